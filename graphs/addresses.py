"""CapturedAddresses: where a graph found its tensors, and whether they are still there.

addresses = CapturedAddresses(rows.tensors, watch=pools)
addresses.note(bucket)      # at its capture
addresses.check(bucket)     # at a replay, in debug mode"""

from collections.abc import Callable, Mapping

from torch import Tensor

from torchpaged.custom_ops.errors import CaptureError

Watch = Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]


class CapturedAddresses:
    """Addresses per bucket, as captured.

    Args:
        static: gives the tensors of the runner's own buffers or rows, by name.
        watch: further ones, by name; or a function that gives them, so that a replaced attribute is
            noticed too.
    """

    def __init__(self, static: Callable[[], Mapping[str, Tensor]], watch: Watch | None) -> None:
        self._static = static
        self._watch = watch if callable(watch) else dict(watch or {})
        self._captured: dict[int, dict[str, int]] = {}

    def note(self, bucket: int) -> None:
        """Remember where everything is now."""
        self._captured[bucket] = {name: tensor.data_ptr() for name, tensor in self._fixed().items()}

    def check(self, bucket: int) -> None:
        """Compare with `note`.

        Raises:
            CaptureError: a tensor moved; by name.
        """
        now = self._fixed()
        for name, address in self._captured[bucket].items():
            if name not in now or now[name].data_ptr() != address:
                found = f"{now[name].data_ptr():#x}" if name in now else "nothing of that name"
                raise CaptureError(
                    f"{name}: expected at {address:#x}, where it was captured, got {found}; "
                    "captured tensors must be updated in place, never replaced"
                )

    def _fixed(self) -> dict[str, Tensor]:
        return {**self._static(), **(self._watch() if callable(self._watch) else self._watch)}
