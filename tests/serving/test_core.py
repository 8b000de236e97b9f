import random

import pytest

from evernear.errors import IntegrityError
from evernear.release.parts import ReleaseParts
from evernear.serving.core import Core
from evernear.serving.messages import Prediction, Refusal


@pytest.fixture(scope="module")
def core(parts: ReleaseParts) -> Core:
    return Core.open(parts)


def test_a_release_answers_as_it_did_when_it_was_archived(core: Core, parts: ReleaseParts) -> None:
    for image, query in parts.smoke_queries():
        (answer,) = core.predict([image])
        assert isinstance(answer, Prediction)
        assert (answer.pred, answer.unknown, answer.version) == (
            query.pred,
            query.unknown,
            parts.manifest.version,
        )
        assert answer.dist == pytest.approx(query.dist, abs=1e-4)
        assert answer.neighbors[0].dist == pytest.approx(answer.dist)
        assert [n.dist for n in answer.neighbors] == sorted(n.dist for n in answer.neighbors)


def test_a_bad_image_fails_alone_wherever_it_stands(core: Core, parts: ReleaseParts) -> None:
    good = [image for image, _ in parts.smoke_queries()]
    alone = [core.predict([image])[0] for image in good]
    assert all(isinstance(answer, Prediction) for answer in alone)
    shuffle = random.Random(0)
    for _ in range(20):
        bad = [b"", b"text", good[0][:40], b"\x89PNG\r\n\x1a\n", Refusal(message="Refused before.")]
        batch = [(number, image) for number, image in enumerate(good)] + [(None, each) for each in bad]
        shuffle.shuffle(batch)
        for (number, _), answer in zip(batch, core.predict([image for _, image in batch]), strict=True):
            if number is None:
                assert isinstance(answer, Refusal)
                assert answer.code == 400
                assert answer.message.endswith(".")
            else:
                assert isinstance(answer, Prediction)
                same = alone[number]
                assert isinstance(same, Prediction)
                assert (answer.pred, answer.unknown) == (same.pred, same.unknown)
                assert answer.dist == pytest.approx(same.dist, abs=1e-4), "its neighbours in the batch matter"


def test_a_batch_of_bad_images_and_an_empty_one(core: Core) -> None:
    assert core.predict([]) == []
    assert all(isinstance(answer, Refusal) for answer in core.predict([b"", b"x"]))


def test_an_image_of_another_size_is_answered(core: Core) -> None:
    from io import BytesIO

    from PIL import Image

    buffer = BytesIO()
    Image.new("RGB", (300, 200), "white").save(buffer, format="JPEG")
    (answer,) = core.predict([buffer.getvalue()])
    assert isinstance(answer, Prediction)


def test_a_release_with_the_index_of_another_network_does_not_load(parts: ReleaseParts) -> None:
    other = parts.manifest.model_copy(update={"network_sha256": "0" * 64})
    with pytest.raises(IntegrityError, match="not of 000000000000"):
        Core.open(ReleaseParts(other, parts.directory))
