"""Prove that a release answers as it did when it was archived, before anybody depends on it."""

from typing import Protocol

from evernear.errors import EvernearError, ServingError
from evernear.release.archive_reader import ReleaseParts
from evernear.serving.responses import Prediction

DISTANCE_TOLERANCE = 1e-3  # rounding of float32 between machines; the square root is steep near zero


class Predicts(Protocol):
    """What is asked: a `evernear.serving.client.Client`, or what reaches a server in another way."""

    def predict(self, image: bytes, version: str | None = None) -> Prediction:
        """As `evernear.serving.client.Client.predict`."""
        ...


def smoke(client: Predicts, parts: ReleaseParts) -> int:
    """Ask the release's own URL its stored queries; the number that were answered.

    Raises:
        ServingError: an answer is missing or is not the stored one, or no query is stored.
    """
    version = parts.manifest.version
    queries = parts.smoke_queries()
    if not queries:
        raise ServingError(f"Release {version} stores no query to be tested with.")
    for image, query in queries:
        try:
            answer = client.predict(image, version)
        except EvernearError as error:
            raise ServingError(f"Release {version} fails its smoke test with {query.file}: {error}") from None
        told = (answer.pred, answer.unknown, answer.version)
        if told != (query.pred, query.unknown, version) or abs(answer.dist - query.dist) > DISTANCE_TOLERANCE:
            raise ServingError(
                f"Release {version} fails its smoke test: {query.file} is {answer.pred} at {answer.dist:.4f} "
                f"by {answer.version}, and was {query.pred} at {query.dist:.4f} when it was archived."
            )
    return len(queries)
