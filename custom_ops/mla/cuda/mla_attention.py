"""mla_attention of the ``cuda`` backend: short queries and selected positions by the Hopper kernels,
everything that they can't take by the Triton kernels."""

from torchpaged.custom_ops.cuda import gpu
from torchpaged.custom_ops.cuda.routes import hopper_or_triton
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.check import check_mla_attention
from torchpaged.custom_ops.mla.cuda import latent, latent_selected, selected, shape


def mla_attention(call: LatentCall) -> None:
    """Launch; arguments as in ``custom_ops/mla/schema.py``. Every choice here depends on shapes, never on
    lengths."""
    hopper_or_triton(
        call,
        call.q.device,
        route=route,
        check=check_mla_attention,
        launch=_launch,
        triton="torchpaged.custom_ops.mla.triton.mla_attention",
    )


def _launch(call: LatentCall) -> None:
    num_sms = gpu.num_sms(call.q.device.index or 0)
    if call.indices is None:
        latent.attend(call, shape.LatentSpec.of(call, num_sms))
    elif latent_selected.why_not(call) is None:
        latent_selected.attend(call)
    else:
        selected.attend(call, num_sms)


def route(call: LatentCall) -> str | None:
    """Why a call goes to Triton, or None: from shapes, dtypes, strides and addresses alone."""
    if call.q.dim() != 3 or call.kv_cache.dim() != 4 or call.out.dim() != 3:
        return "shapes that the check refuses"
    if not call.q.shape[0] or not call.block_table.shape[0]:
        return "no requests or no tokens"
    capability = gpu.capability(call.q.device.index or 0)
    if call.indices is None:
        return shape.why_not(call, capability)
    if reason := selected.why_none(call, capability):
        return reason
    if latent_selected.why_not(call) is None:
        return None
    return selected.why_not(call) or selected.why_slower(call)
