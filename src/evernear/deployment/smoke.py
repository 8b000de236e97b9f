"""The smoke test: a release's answers to its stored queries must equal the archived answers.

Labels and unknown flags are compared only where rounding cannot change them. Distances must always
agree within `DISTANCE_TOLERANCE`.
"""

from typing import Protocol

from evernear.errors import EvernearError, ServingError
from evernear.index.description import DISTANCE_TOLERANCE
from evernear.release.archive_reader import ReleaseParts, SmokeQuery
from evernear.serving.responses import Prediction


class PredictionClient(Protocol):
    """`evernear.serving.client.Client`, possibly with a different transport."""

    def predict(self, image: bytes, version: str | None = None) -> Prediction: ...


def smoke(client: PredictionClient, parts: ReleaseParts) -> int:
    """Send the stored queries to the release's own URL, and return the number of answered ones.

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
        if not _agree(answer, query) or answer.version != version:
            raise ServingError(
                f"Release {version} fails its smoke test: {query.file} is {_words(answer)} by {answer.version}, and "
                f"was {_words(query)} when it was archived. The threshold is {parts.manifest.threshold:.4f}, and "
                f"distances may differ by {DISTANCE_TOLERANCE:g}."
            )
    return len(queries)


def _agree(answer: Prediction, query: SmokeQuery) -> bool:
    same = not query.settled or (answer.pred, answer.unknown) == (query.pred, query.unknown)
    return same and abs(answer.dist - query.dist) <= DISTANCE_TOLERANCE


def _words(prediction: Prediction | SmokeQuery) -> str:
    return f"{prediction.pred} ({'unknown' if prediction.unknown else 'known'}) at {prediction.dist:.4f}"
