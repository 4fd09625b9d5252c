"""Bagua's algorithm modules, by Bagua's names."""

from __future__ import annotations

from baguarun.torch_api.algorithms import (
    async_model_average,
    bytegrad,
    decentralized,
    gradient_allreduce,
    q_adam,
)
from baguarun.torch_api.algorithms.base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "GlobalAlgorithmRegistry",
    "async_model_average",
    "bytegrad",
    "decentralized",
    "gradient_allreduce",
    "q_adam",
]

GlobalAlgorithmRegistry.register(
    "gradient_allreduce", gradient_allreduce.GradientAllReduceAlgorithm, "gradients averaged in full"
)
GlobalAlgorithmRegistry.register("bytegrad", bytegrad.ByteGradAlgorithm, "gradients averaged with 8 bits")
GlobalAlgorithmRegistry.register("qadam", q_adam.QAdamAlgorithm, "Adam with momentum of 8 bits or 1 bit")
GlobalAlgorithmRegistry.register(
    "decentralized", decentralized.DecentralizedAlgorithm, "weights averaged with other ranks"
)
GlobalAlgorithmRegistry.register(
    "low_precision_decentralized",
    decentralized.LowPrecisionDecentralizedAlgorithm,
    "changes of weights sent to two neighbours with 8 bits",
)
GlobalAlgorithmRegistry.register(
    "async", async_model_average.AsyncModelAverageAlgorithm, "weights averaged in the background"
)
