"""The networks of which a training chooses one (`evernear.evaluation.choice`)."""

from typing import Literal

from evernear.common.frozen import Frozen

CandidateName = Literal["pretrained", "head", "fine-tuned"]
CANDIDATES: dict[CandidateName, str] = {
    "pretrained": "the pretrained network as it is",
    "head": "a head on it",
    "fine-tuned": "the fine-tuned network",
}


class Candidate(Frozen):
    """A network, and how many of the query images it names right as it would be deployed."""

    name: CandidateName
    right: int
    asked: int
    chosen: bool

    @property
    def title(self) -> str:
        return CANDIDATES[self.name]

    @property
    def share(self) -> str:
        return f"{self.right / max(1, self.asked):.1%}"
