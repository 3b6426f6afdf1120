"""Where an attention module lives, and the backend that is chosen for it there: at construction, again when
the module moves, and anew in a copy. `torchpaged.PagedAttention` is one.
"""

from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchpaged.backends import (
    Capabilities,
    Choice,
    GraphSupport,
    Limits,
    Route,
    Session,
    attention_spec,
    get_backend,
    select_backend,
)
from torchpaged.backends.choose.route import route_of
from torchpaged.backends.features import OWN_FEATURES
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.checks import device_here
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.pools import FLOATS, FP8, check_scale_values
from torchpaged.prefixes.attention import can_read_once

#: Buffers that stay float32 whatever the module's dtype is.
_FLOAT32 = ("alibi_slopes", "output_scale")
#: What shapes may be tried with on the meta device: everything.
_META = Capabilities(
    device_types=("meta",),
    dtypes=FLOATS,
    kv_dtypes=(*FLOATS, *FP8),
    graph_support=GraphSupport.ALWAYS,
    mods=True,
    batch_invariant=True,
    features=OWN_FEATURES,
)


def _numbers(values: Sequence[float] | Tensor | None) -> list[float] | None:
    """On the host; None where there are none."""
    if isinstance(values, Tensor):
        return None if values.is_meta else [float(value) for value in values.flatten().tolist()]
    return None if values is None else [float(value) for value in values]


def _check_session(session: Any, limits: Any, backend: Any) -> None:
    if not isinstance(session, (Session, NoneType)):
        raise ArgumentError("session", "a Session, such as open_session gives", repr(session))
    if not isinstance(limits, (Limits, NoneType)):
        raise ArgumentError("limits", "Limits", repr(limits))
    if session is not None and (limits is not None or backend != "auto"):
        fix = "the session has a backend and limits"
        raise ArgumentError("session", "a session, or a backend and limits", "both", fix)


class BackendModule(nn.Module):
    """A module that ends its construction with `_place`."""

    #: Attributes that the backend is asked for, under the names of `attention_spec`.
    _asked: tuple[str, ...] = ()
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    output_scale: Tensor | None
    num_heads: int
    _home: Tensor

    def _place(
        self,
        tensors: Mapping[str, Sequence[float] | Tensor | None],
        backend: str | Route,
        limits: Limits | None,
        session: Session | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Make the buffers ``tensors`` and choose a backend; arguments as those of `PagedAttention`."""
        self.requested_backend = backend
        _check_session(session, limits, backend)
        self._limits, self._given = Limits() if limits is None else limits, session
        # an empty buffer that knows where the module lives, since there may be no parameter to ask
        home = None if device is None else device_here(device)
        self.register_buffer("_home", torch.empty(0, device=home, dtype=dtype), persistent=False)
        for name, values in tensors.items():
            self.register_buffer(name, self._per_head(name, values))
        # numbers that a buffer on the meta device can't hold
        self._numbers = {name: _numbers(values) for name, values in tensors.items() if self._home.is_meta}
        self._choose()

    def _per_head(self, name: str, values: Sequence[float] | Tensor | None) -> Tensor | None:
        if values is None:
            return None
        dtype = torch.float32 if name in _FLOAT32 else self._home.dtype
        count, words = self.num_heads, "one number per head"
        if name == "output_scale":
            count, words = 1, "one positive number"
        try:
            held = values if isinstance(values, Tensor) else torch.tensor(values, device="cpu", dtype=dtype)
        except (TypeError, ValueError, RuntimeError):
            raise ArgumentError(name, words, repr(values)) from None
        tensor = held.to(self._home.device, dtype)
        if name == "output_scale" and tensor.dim() == 0:
            tensor = tensor[None]
        if tensor.shape != (count,):
            raise ArgumentError(name, f"shape [{count}] ({words})", str(list(tensor.shape)))
        if name == "output_scale":
            check_scale_values(name, tensor)
        return tensor

    def _choose(self) -> None:
        asked = {name: getattr(self, name) for name in self._asked}
        spec = self.spec = attention_spec(device=self._home.device, dtype=self._home.dtype, **asked)
        self._on_meta = self._home.is_meta
        if self._on_meta:
            if self.requested_backend != "auto":
                get_backend(self.requested_backend)
            self.choice: Choice = Choice(
                "meta", Route("meta", "meta"), "none yet: chosen when the module gets a real device"
            )
            self._use(Session("meta", _META, BACKEND_OPS["default"], [spec], self._limits, spec.device))
        elif self._given is None:
            self.choice = select_backend(spec, self.requested_backend)
            self._use(self.choice.backend.open([spec], self._limits, self._home.device))
        else:
            self.choice = Choice(self._given.name, route_of(self._given), "session= was given")
            self._use(self._given)

    def _use(self, session: Session) -> None:
        self._workspace = session.workspace(self.spec)
        self.session, self._ops = session, session.ops
        self._reads_once = can_read_once(self.spec, session)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: op handles can't be pickled, and a session is a place in this process's
        memory. A copy opens its own."""
        here = ("_ops", "_workspace", "session", "_given")
        limits = self._limits if self._given is None else self._given.limits
        return {name: value for name, value in self.__dict__.items() if name not in here} | {
            "_chosen_on": self._home.device.type,
            "_limits": limits,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The backend stays as it was chosen; loaded onto another kind of device, or where it can't run, it
        is chosen again."""
        chosen_on = state.pop("_chosen_on")
        super().__setstate__(state)
        self._given = None
        if self._on_meta or self._home.device.type != chosen_on or self.choice.backend.unavailable():
            self._choose()
        else:
            self._use(self.choice.backend.open([self.spec], self._limits, self._home.device))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        home, was_meta = self._home, [name for name in self._numbers if self._is_meta(name)]
        self._buffers["_home"] = None
        given = {name: getattr(self, name) for name in _FLOAT32}
        try:
            super()._apply(fn, recurse)
        finally:
            self._buffers["_home"] = home
        try:
            self._home = fn(home)
        except NotImplementedError:  # there is nothing in it that could be lost with the meta device
            self._home = fn(torch.empty(0, dtype=home.dtype, device="cpu"))
        for name in _FLOAT32:  # when the module becomes bf16, too
            held, before = getattr(self, name), given[name]
            if held is not None and held.dtype != before.dtype:  # its numbers are rounded
                setattr(self, name, held.float() if held.is_meta else before.to(held.device))
        self._fill(was_meta)
        self._choose()
        return self

    def _is_meta(self, name: str) -> bool:
        buffer = getattr(self, name)
        return buffer is not None and buffer.is_meta

    def _fill(self, names: Sequence[str]) -> None:
        """Numbers that were given, into buffers that left the meta device without them."""
        for name in names:
            if self._numbers[name] is not None and not self._home.is_meta:
                setattr(self, name, self._per_head(name, self._numbers[name]))

    def _settle(self, query: Tensor) -> None:
        """Choose where the module was not told that it left the meta device: loaders replace tensors one by
        one, and do not know those that are in no state dict.

        Raises:
            ArgumentError: in a trace, which can't choose.
        """
        if torch.compiler.is_compiling():
            raise ArgumentError(
                type(self).__name__,
                "a backend",
                "a module that was built on the meta device and whose tensors were assigned",
                "call model.to(device), or one forward, before compiling it",
            )
        with torch.inference_mode(False):  # an inference tensor could not be loaded into later
            if self._home.is_meta:
                self._home = torch.empty(0, device=query.device, dtype=query.dtype)
            self._fill([name for name in self._numbers if self._is_meta(name)])
        self._choose()
