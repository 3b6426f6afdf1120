"""SemaphoreSession: where the programs of a GPU kernel that share a request meet, kept from call to call.

A kernel without a semaphore makes its own, which costs a memset per layer. Its numbers are zero before and
after each call.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchpaged.backends.session import Session
from torchpaged.backends.spec import AttentionSpec
from torchpaged.custom_ops.errors import SemaphoreError

#: Requests that there is room for where no limit was said: 64 KiB for layers of 8 kv heads.
ASSUMED_MAX_NUM_REQS = 1024


def make_semaphore(count: int, device: torch.device | str) -> Tensor:
    """A semaphore to keep.

    Args:
        count: numbers: requests of the largest batch times kv heads of the layer that has most.
        device: where the kernels run.

    Returns:
        ``[count]`` int32 zeros, marked as never moving for ``torch.compile``.
    """
    with torch.inference_mode(False):  # an inference tensor could not be written under plain no_grad later
        semaphore = torch.zeros(count, dtype=torch.int32, device=device)
    # guard=False: a new session must not recompile the model.
    torch._dynamo.mark_static_address(semaphore, guard=False)
    return semaphore


class SemaphoreSession(Session):
    """A session whose layers share one semaphore, two numbers per request and kv head: attention counts in
    the first half, what runs beside it in the second."""

    def _open(self, specs: Sequence[AttentionSpec]) -> None:
        self._max_num_reqs = self.limits.max_num_reqs or ASSUMED_MAX_NUM_REQS
        self._most_heads = max((spec.num_kv_heads for spec in specs), default=1)
        # The last one is the longest; layers and graphs may know the others.
        self._semaphores: list[Tensor] = []
        self._home = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        self._elsewhere: dict[tuple[int, int], dict[str, Tensor]] = {}  # by stream and length

    def _make_workspace(self, spec: AttentionSpec) -> dict[str, Tensor]:
        self._most_heads = max(self._most_heads, spec.num_kv_heads)
        if not self._semaphores or self._semaphores[-1].shape[0] < 2 * self._max_num_reqs * spec.num_kv_heads:
            self._semaphores.append(make_semaphore(2 * self._max_num_reqs * self._most_heads, self.device))
        return {"semaphore": self._semaphores[-1]}

    def workspace_for(self, workspace: dict[str, Tensor], num_reqs: int) -> dict[str, Tensor]:
        """A semaphore of its own for every stream; none, so that the kernel makes one, for more requests than
        there is room for."""
        if num_reqs > self._max_num_reqs:
            return {}
        if self.device.type != "cuda":
            return workspace
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if stream == self._home or torch.cuda.is_current_stream_capturing():
            return workspace
        key = (stream, workspace["semaphore"].shape[0])
        if key not in self._elsewhere:
            self._elsewhere[key] = {"semaphore": make_semaphore(key[1], self.device)}
        return self._elsewhere[key]

    def tensors(self) -> dict[str, Tensor]:
        """The semaphores that captured steps may know."""
        return {f"semaphore[{index}]": semaphore for index, semaphore in enumerate(self._semaphores)}

    def reset(self) -> None:
        """Zero them: a kernel that did not end may have left one set."""
        for semaphore in (
            *self._semaphores,
            *(workspace["semaphore"] for workspace in self._elsewhere.values()),
        ):
            semaphore.zero_()

    def check(self, launch: str) -> None:
        """Look whether they are zeros; waits for the launch.

        Raises:
            SemaphoreError: they are not.
        """
        for semaphore in self._semaphores:
            left = semaphore.nonzero().flatten()[:4].tolist()
            if left:
                raise SemaphoreError(
                    f"semaphore: expected zeros after {launch}, got {semaphore[left].tolist()} at {left}; "
                    "parts of its attention were merged, or windows of its states moved on, too early or "
                    "not at all, so that its results are wrong: a launch before it was cut short, or two "
                    "that share the semaphore ran on two streams at once. Give each stream a session of its "
                    "own, call reset(), and compute these requests again"
                )

    def close(self) -> None:
        """Give the semaphores back."""
        super().close()
        self._semaphores, self._elsewhere = [], {}
