"""What runs inside vLLM's worker processes (`--worker-extension-cls`): loading weights completely, and giving back pinned KV.

Why loading: on CPU vLLM keeps a packed copy of an output head that is tied to the embedding, and its `reload_weights` does not renew that
copy: every tensor is new but the head, and nothing says so (0.32.0: the log-probs are those of the new model with the old head, to 1e-6).
"""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Mixed into vLLM's worker class, which has `reload_weights` and `model_runner`."""

    model_runner: Any
    reload_weights: Any

    def gyre_load_weights(self, path: str) -> None:
        """Take all weights from a Hugging Face directory."""
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
        from vllm.platforms import current_platform

        self.reload_weights(weights_path=path)
        if not current_platform.is_cpu():
            return
        for layer in self.model_runner.get_model().modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, UnquantizedEmbeddingMethod):
                method.process_weights_after_loading(layer)

    def gyre_unpin(self, request: str) -> bool:
        """End the lease of the KV that this request of the engine's own numbering keeps pinned; whether there was one.

        Only for pins that surely nobody pulls: the blocks are used again at once. vLLM has no call for it (0.32.0), but it notices a lease
        that is over with the next pass.
        """
        from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group

        if not has_kv_transfer_group():
            return False
        connector: Any = get_kv_transfer_group()
        leases: dict[str, float] = connector.connector_worker._reqs_to_send
        if request not in leases:
            return False
        leases[request] = 0.0
        return True
