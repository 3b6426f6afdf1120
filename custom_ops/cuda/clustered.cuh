// CLUSTERED: the attribute of a kernel whose CTAs come in clusters of CLUSTER, which its constants say.
#pragma once

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif
