"""A kernel's machine code on one device: loaded by the driver, and launched.

kernel = Kernel(cubin, "paged_decode", shared_bytes=104448)
kernel.launch(grid, threads, params, early=True)
"""

import ctypes
import threading
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.cuda import gpu
from torchpaged.custom_ops.errors import BackendUnavailableError

#: A CUtensorMap, as a kernel's parameters hold it.
Map = ctypes.c_ubyte * 128


def address(tensor: Tensor | None) -> int:
    """Of the first number, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def checked(result: Any, what: str) -> Any:
    """The values of a cuda.bindings call, or its error as an exception."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"{what} failed: {error}")
    return values[0] if len(values) == 1 else values


class Kernel:
    """A loaded kernel of one device.

    ``prefer_shared``: cut a multiprocessor's memory in favour of shared memory, if the kernel has
    more than 48 KiB of it.
    """

    def __init__(self, code: bytes, name: str, shared_bytes: int, *, prefer_shared: bool = False) -> None:
        from cuda.bindings import driver

        # The device's context exists and is current from here on.
        torch.empty(1, dtype=torch.uint8, device="cuda")
        self._driver, self._index = driver, torch.cuda.current_device()
        self._module = checked(driver.cuModuleLoadData(code), "cuModuleLoadData")
        self._function = checked(
            driver.cuModuleGetFunction(self._module, name.encode()), "cuModuleGetFunction"
        )
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (error,) = driver.cuFuncSetAttribute(self._function, attribute, shared_bytes)
        if int(error):
            most = gpu.shared_per_cta(torch.cuda.current_device())
            raise BackendUnavailableError(
                f"backend 'cuda': {name} asks for {shared_bytes} bytes of dynamic shared memory, the device "
                f"refuses ({error}); a thread block may have {most} in all; use backend='triton'"
            )
        if prefer_shared and shared_bytes > 48 * 1024:
            checked(
                driver.cuFuncSetCacheConfig(self._function, driver.CUfunc_cache.CU_FUNC_CACHE_PREFER_SHARED),
                "cuFuncSetCacheConfig",
            )
        self._resident: dict[tuple[int, int, int], int] = {}
        self._early = driver.CUlaunchAttribute()
        self._early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        self._early.value.programmaticStreamSerializationAllowed = 1
        self._shared_bytes = shared_bytes
        self._local = threading.local()  # a launch fills in a configuration: threads must not share one

    def _config(self) -> Any:
        if not hasattr(self._local, "config"):
            config = self._driver.CUlaunchConfig()
            config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
            config.sharedMemBytes = self._shared_bytes
            # Set once, and each launch says whether it counts: cuda-bindings before 13.3 frees a list twice
            # that was replaced by an empty one.
            config.attrs = [self._early]
            self._local.config = config
        return self._local.config

    def parameters(self) -> list[tuple[int, int]]:
        """Offset and bytes of each parameter, as the machine code has them."""
        found: list[tuple[int, int]] = []
        while True:
            error, offset, size = self._driver.cuFuncGetParamInfo(self._function, len(found))
            if int(error):
                break
            found.append((int(offset), int(size)))
        return found

    def leave_room(self) -> None:
        """Cut a multiprocessor's memory in favour of shared memory as far as it goes, not only as far as this
        kernel's CTAs need: those of the kernel behind it find room beside them."""
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        checked(self._driver.cuFuncSetAttribute(self._function, attribute, 100), "cuFuncSetAttribute")

    def resident(self, threads: int, cluster: int, wanted: int) -> int:
        """CTAs that run at once: ``wanted``, or for clusters (a power of two CTAs each) as many as the device
        places together."""
        if cluster == 1:
            return wanted
        key = threads, cluster, wanted
        if key not in self._resident:
            driver, config = self._driver, self._driver.CUlaunchConfig()
            if cluster > 8:
                allowed = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
                checked(driver.cuFuncSetAttribute(self._function, allowed, 1), "cuFuncSetAttribute")
            config.gridDimX, config.gridDimY, config.gridDimZ = wanted // cluster * cluster, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
            config.sharedMemBytes = self._shared_bytes
            dimension = driver.CUlaunchAttribute()
            dimension.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimension.value.clusterDim.x, dimension.value.clusterDim.y, dimension.value.clusterDim.z = (
                cluster,
                1,
                1,
            )
            config.attrs, config.numAttrs = [dimension], 1
            most = checked(
                driver.cuOccupancyMaxActiveClusters(self._function, config), "cuOccupancyMaxActiveClusters"
            )
            if most < 1:
                raise BackendUnavailableError(
                    f"backend 'cuda': no cluster of {cluster} CTAs fits the device "
                    "(cuOccupancyMaxActiveClusters); use backend='triton'"
                )
            self._resident[key] = min(most * cluster, wanted // cluster * cluster)
        return self._resident[key]

    def launch(
        self,
        grid: int,
        threads: int,
        arguments: ctypes.Structure | ctypes.Array[Any],
        *,
        early: bool,
        offsets: tuple[int, ...] = (0,),
    ) -> None:
        """Launch on its device's current stream. ``arguments``: the parameters, at ``offsets``; one struct by
        default; the driver has copied them when this returns. ``early``: programmatic dependent launch."""
        config = self._config()
        config.gridDimX, config.blockDimX = grid, threads
        config.hStream = torch.cuda.current_stream(self._index).cuda_stream
        config.numAttrs = int(early)
        begin = ctypes.addressof(arguments)
        pointers = (ctypes.c_void_p * len(offsets))(*(begin + offset for offset in offsets))
        (error,) = self._driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0)
        if int(error):
            raise RuntimeError(f"cuLaunchKernelEx failed: {error}")
