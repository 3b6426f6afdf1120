"""Decode steps of transformers' own loop, replayed from a graph: those of a beam search, each of which
transformers launches from Python.

    steps = ReplayedSteps(model, cache, CudaCapture(device))
    type(model).generate(steps.model, ids, num_beams=4, past_key_values=cache)

`ReplayedSteps.model` has all that the model has; only calling it differs. The second decode step is captured
over tensors that stay; later ones copy their ids and positions there and replay it: lengths and slots move on
in the graph, blocks that a reordering moves are in a table that stays, too, and those that it copies are
copied by the graph (`LateCopies`).
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from torchpaged.graphs.capture import CaptureBackend, Captured, HostCapture
from torchpaged.graphs.capture_bucket import no_garbage_collection
from torchpaged.model_state import hooks_of

_LOG = logging.getLogger("torchpaged.engine")
_CACHES = ("past_key_values", "cache")  # the second since transformers 5.24
#: What a step may be given besides tensors, the same at each.
_KNOWN = ("attention_mask", "use_cache", "return_dict", "logits_to_keep", *_CACHES)


def _has_hooks(model: Any) -> bool:
    """Whether a module has forward hooks that a replay would leave out; fused layers' only look."""
    hooks = chain.from_iterable(map(hooks_of, model.modules()))
    return not all(str(getattr(hook, "__module__", "")).startswith("torchpaged.") for hook in hooks)


class ReplayedSteps:
    """The steps of one call of generate().

    Args:
        model: of transformers.
        cache: the call's `torchpaged.hf.PagedCache`, whose decode steps have no groups (``cascade=False``).
        backend: how a step becomes a graph.

    Attributes:
        model: to be called instead.
        num_replayed: steps that came from the graph.
    """

    def __init__(self, model: Any, cache: Any, backend: CaptureBackend) -> None:
        self._cache, self._backend = cache, backend
        self._num_eager = self.num_replayed = 0
        self._may_capture = not _has_hooks(model)
        kind, step = type(model), self._step
        self._graph: Captured | None = None
        self._inputs = dict[str, Tensor]()
        self._output: Any = None

        def call(called: Any, *args: Any, **kwargs: Any) -> Any:
            return step(partial(kind.__call__, called), args, kwargs)

        self.model: Any = object.__new__(
            type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
        )
        object.__setattr__(self.model, "__dict__", vars(model))

    def close(self) -> None:
        """Free the graph, and what it holds of the cache."""
        self._end_late_copies()
        self.model = self._cache = self._graph = self._output = None
        self._inputs = {}

    def _step(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = None if args else self._tensors(kwargs)
        if tensors is None:
            if self._cache.late_copies is not None:
                self._cache.late_copies.flush()
            return run(*args, **kwargs)
        if self._graph is None:
            self._num_eager += 1
            if self._num_eager < 2 or not self._can_capture():  # the first compiles and loads what it needs
                return run(**kwargs)
            return self._capture(run, tensors, kwargs)
        for name, tensor in tensors.items():
            self._inputs[name].copy_(tensor)
        self._cache.rows.replay(1)
        self._cache.late_copies.stage()
        self._graph.replay()
        self.num_replayed += 1
        return self._output

    def _end_late_copies(self) -> None:
        if self._cache.late_copies is not None:
            self._cache.late_copies.flush()
            self._cache.late_copies = None

    def _tensors(self, kwargs: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """What changes from step to step; None: it is no decode step, or another than the captured one. The
        mask says nothing that the prompt's did not: padding is on its left."""
        ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        tensors = {
            name: value
            for name, value in kwargs.items()
            if isinstance(value, Tensor) and name != "attention_mask"
        }
        if ids is None or ids.dim() != 2 or ids.shape[1] != 1 or len(ids) != self._cache.batch_size:
            return None
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            return None
        if not any(kwargs.get(name) is self._cache for name in _CACHES) or any(
            value is not None and value is not False and name not in _KNOWN and name not in tensors
            for name, value in kwargs.items()
        ):
            return None
        shapes = {name: (value.shape, value.dtype) for name, value in tensors.items()}
        captured = {name: (value.shape, value.dtype) for name, value in self._inputs.items()}
        return tensors if not captured or shapes == captured else None

    def _can_capture(self) -> bool:
        """Whether no hook and no failure forbids it, and all that a step moves lies in tensors that stay:
        rings and states are made anew where rows are reordered."""
        cache = self._cache
        plain = not cache.dense and not cache.states and cache.rows.rolling is None
        return self._may_capture and plain and not cache.session.plans and bool(cache.rows.knows_room(2))

    def _capture(self, run: Callable[..., Any], tensors: dict[str, Tensor], kwargs: dict[str, Any]) -> Any:
        self._inputs = {name: tensor.clone() for name, tensor in tensors.items()}
        fixed = {**kwargs, **self._inputs, "attention_mask": None}

        # imported here: transformers is optional
        from torchpaged.hf.row_changes import LateCopies

        late = LateCopies(self._cache, self._cache.batch_size, self._cache.rows.seq_lens.device)
        late.launch()  # of nothing: what it needs is compiled and loaded

        def launch() -> Tensor:
            late.launch()
            self._output = run(**fixed)
            logits: Tensor = self._output.logits
            return logits

        runs_at_capture = isinstance(self._backend, HostCapture)
        try:
            with no_garbage_collection():
                graph = self._backend.capture(launch, self._backend.new_pool())
        except Exception as error:
            if runs_at_capture:
                raise
            _LOG.warning("steps of this beam search are launched from Python: %s", error)
            self._inputs, self._output, self._may_capture = {}, None, False
            self._cache.forget_recorded()
            return run(**kwargs)
        self._graph, self._cache.late_copies = graph, late
        if not runs_at_capture:
            graph.replay()
        return self._output
