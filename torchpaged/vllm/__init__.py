"""The entry point that vLLM loads (``vllm.general_plugins``): it names torchpaged's attention backend, and no
more. Nothing runs on it unless a user asks for ``--attention-backend CUSTOM``.

Experimental: tested against a stand-in of vLLM's documented interface, not yet under a vLLM that runs.
"""

import logging

_LOG = logging.getLogger("torchpaged.compat")
#: Where vLLM finds the class; it is imported when it is asked for.
BACKEND_PATH = "torchpaged.vllm.backend.TorchpagedAttentionBackend"


def register() -> None:
    """Register the backend under vLLM's name for those of others, CUSTOM, if no other plug-in has taken it.

    It never raises: a vLLM whose registry is another one starts as if torchpaged were not there, and says so.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        custom = AttentionBackendEnum.CUSTOM
        if custom.is_overridden():
            if custom.get_path() != BACKEND_PATH:
                _LOG.warning(
                    "vLLM's CUSTOM attention backend is taken by %s: torchpaged's is not registered",
                    custom.get_path(),
                )
            return
        register_backend(custom, BACKEND_PATH)
    except (ImportError, AttributeError) as error:
        _LOG.warning(
            "torchpaged's attention backend is not registered: this vLLM has no such registry (%s)", error
        )
