"""Rankings: the samples with the largest scores for each channel. They merge in any order to the same result."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NONE = -1  # stands for a sample where there are fewer than the ranking has places


@dataclass(frozen=True, eq=False)
class Ranking:
    """The samples with the largest scores for each channel, the largest first; of equal scores, the smaller sample first."""

    scores: NDArray[np.float64]  # (places, channels), -inf where there is no sample
    samples: NDArray[np.int64]  # (places, channels), `NONE` where there is no sample
    positions: NDArray[np.int32]  # (places, channels, dimensions): of the largest entry

    @classmethod
    def empty(cls, places: int, channels: int, dimensions: int) -> "Ranking":
        """Without any sample."""
        return cls(
            np.full((places, channels), -np.inf),
            np.full((places, channels), NONE, dtype=np.int64),
            np.zeros((places, channels, dimensions), dtype=np.int32),
        )

    def merged(self, other: "Ranking") -> "Ranking":
        """The largest of both, in as many places as this one has. Their samples differ."""
        scores, samples = np.concatenate([self.scores, other.scores]), np.concatenate([self.samples, other.samples])
        order = np.lexsort((samples, -scores), axis=0)[: len(self.scores)]
        positions = np.concatenate([self.positions, other.positions])
        return Ranking(
            np.take_along_axis(scores, order, 0),
            np.take_along_axis(samples, order, 0),
            np.take_along_axis(positions, order[:, :, None], 0),
        )

    def with_samples(self, scores: NDArray[np.float64], samples: NDArray[np.int64], positions: NDArray[np.int32]) -> "Ranking":
        """The ranking with further samples: scores (samples, channels), positions (samples, channels, dimensions)."""
        if not len(samples):
            return self
        every = np.broadcast_to(samples[:, None], scores.shape)
        return self.merged(Ranking(scores, every, positions))
