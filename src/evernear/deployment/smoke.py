"""The smoke test: a release must answer its stored queries as when it was archived."""

from typing import Protocol

from evernear.errors import EvernearError, ServingError
from evernear.release.archive_reader import ReleaseParts
from evernear.serving.responses import Prediction

DISTANCE_TOLERANCE = 1e-3  # float32 rounding differs between machines; the square root is steep near zero


class PredictionClient(Protocol):
    """A client: `evernear.serving.client.Client`, or one with another transport."""

    def predict(self, image: bytes, version: str | None = None) -> Prediction:
        """As `evernear.serving.client.Client.predict`."""
        ...


def smoke(client: PredictionClient, parts: ReleaseParts) -> int:
    """Send the stored queries to the release's own URL; return how many were answered.

    Raises:
        ServingError: an answer is missing or differs from the stored one, or no query is stored.
    """
    version = parts.manifest.version
    queries = parts.smoke_queries()
    if not queries:
        raise ServingError(f"Release {version} has no stored queries for the smoke test.")
    for image, query in queries:
        try:
            answer = client.predict(image, version)
        except EvernearError as error:
            raise ServingError(f"Release {version} fails its smoke test with {query.file}: {error}") from None
        actual = (answer.pred, answer.unknown, answer.version)
        if actual != (query.pred, query.unknown, version) or abs(answer.dist - query.dist) > DISTANCE_TOLERANCE:
            raise ServingError(
                f"Release {version} fails its smoke test: {query.file} is {answer.pred} at {answer.dist:.4f} "
                f"by {answer.version}, and was {query.pred} at {query.dist:.4f} when it was archived."
            )
    return len(queries)
