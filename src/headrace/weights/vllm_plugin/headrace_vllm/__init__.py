"""Registers Headrace's weight transports in vLLM's factory of weight transfer engines."""

NAMES = {"headrace_file": "FileReceiver", "headrace_gloo": "GlooReceiver"}


def register() -> None:
    """Called by vLLM in each of its processes, perhaps more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # pyright: ignore

    for name, kind in NAMES.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, f"{__name__}.receivers", kind)
