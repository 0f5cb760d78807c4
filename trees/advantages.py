"""Group-relative advantages: how much better an execution did than its siblings.

Invariants: the baseline is over executions, never over paths or calls; an invalid execution leaves the baseline as well as training; a
group without spread teaches nothing (zeros). The standard deviation is the population's (our choice; the source is silent).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def group_advantages(scores: Sequence[float], valid: Sequence[bool], eps: float = 1e-6) -> NDArray[np.float64]:
    """float64[N]: (score - mean) / (std + eps) over the valid executions of one group; 0 for invalid ones.

    Raises ValueError if the lengths differ or a valid score is not finite.
    """
    if len(scores) != len(valid):
        raise ValueError(f"{len(scores)} scores for {len(valid)} executions")
    result = np.zeros(len(scores), np.float64)
    counted = np.asarray(valid, bool)
    kept = np.asarray(scores, np.float64)[counted]
    if not np.isfinite(kept).all():
        raise ValueError(f"scores of valid executions must be finite: {kept.tolist()}")
    if len(kept) == 0 or kept.max() == kept.min():
        return result
    result[counted] = (kept - kept.mean()) / (kept.std() + eps)
    return result
