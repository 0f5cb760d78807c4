"""What runs inside vLLM's worker processes (`--worker-extension-cls`): taking weights completely, and giving back pinned KV.

Weights from a sender come in two calls: all workers receive everything into their host's memory; if all have it, all take it, so a transfer
that breaks leaves every worker with what it had. They are taken as those from files are, by vLLM's own reload, on CPU and GPU alike.
A broadcast (vllm_transfer.py) goes straight into the model: there one that breaks leaves it half new, and the owner is told.

Why loading: on CPU vLLM keeps a packed copy of an output head that is tied to the embedding, and its `reload_weights` does not renew that
copy: every tensor is new but the head, and nothing says so (0.32.0: the log-probs are those of the new model with the old head, to 1e-6).
"""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Mixed into vLLM's worker class, which has `reload_weights` and `model_runner`."""

    model_runner: Any
    reload_weights: Any
    _gyre_received: dict[str, Any] | None = None
    _gyre_receiver: Any = None

    def gyre_load_weights(self, path: str) -> None:
        """Take all weights from a Hugging Face directory."""
        self.reload_weights(weights_path=path)
        if self._gyre_receiver is not None:
            self._gyre_receiver.half = False
        self._renew_head()

    def gyre_receive_weights(self, source: str, version: int, seconds: float) -> dict[str, str]:
        """Get all weights of a version into this host's memory; {failed: why} where they did not arrive whole."""
        from gyre_hpc.engines.protocol import NotReceived
        from gyre_hpc.engines.weight_stream import receive

        self._gyre_received = None
        try:
            self._gyre_received = receive(source, version, seconds)
        except (NotReceived, RuntimeError) as error:  # torch's word for no memory is a RuntimeError
            return {"failed": str(error)}
        return {}

    def gyre_take_weights(self) -> None:
        """Compute with what was received."""
        weights, self._gyre_received = self._gyre_received, None
        if weights is None:
            raise RuntimeError("nothing was received that could be taken")
        self.reload_weights(weights_iterator=iter(weights.items()))
        self._renew_head()

    def gyre_forget_weights(self) -> None:
        """What was received is not wanted: another worker did not get it."""
        self._gyre_received = None

    def gyre_attend_weights(self, source: str, version: int, seconds: float, engine: str) -> dict[str, Any]:
        """Take part in a broadcast; {failed: why, half} where this worker has not all of it, `half`: it must load before it computes."""
        from gyre_hpc.engines.protocol import NotReceived
        from gyre_hpc.engines.vllm_transfer import VllmReceiver
        from gyre_hpc.engines.weight_member import attend

        receiver = self._gyre_receiver = self._gyre_receiver or VllmReceiver(self)
        try:
            attend(source, version, seconds, engine, receiver)
        except NotReceived as error:
            if receiver.half:
                receiver.undo()
            return {"failed": str(error), "half": receiver.half}
        receiver.half = False  # not before: one that is taken out while it finishes has new weights, and its engine goes by the old version
        self._renew_head()
        return {}

    def _renew_head(self) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
        from vllm.platforms import current_platform

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

        from gyre_hpc.engines.handover_nixl import Ended

        if not has_kv_transfer_group():
            return False
        connector: Any = get_kv_transfer_group()
        leases: dict[str, float] = connector.connector_worker._reqs_to_send
        if request not in leases:
            return False
        leases[request] = Ended(0.0)
        return True
