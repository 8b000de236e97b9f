"""The words of a run page that a newcomer does not know, each in one sentence. The pages explain
them where they stand, and the documentation has them as a page."""

import re

from markupsafe import Markup, escape

GLOSSARY = {
    "anchor": "An earlier release with which the gate also compares, so that small losses do not add up over many "
    "releases.",
    "AUROC": "How well distances separate images of known classes from those of unseen ones: the probability that an "
    "image of an unseen class is farther away. 0.5 is chance, 1 is perfect.",
    "budget": "How many more test images than the anchor a release may get wrong before the gate holds it.",
    "candidate": "The release that the run made, before the gate has decided about it.",
    "champion": "The release that is live, with which the gate compares the candidate.",
    "FPR": "Of images of unseen classes, the share that is taken for a known class.",
    "gate": "The rules that decide whether a candidate replaces the live release.",
    "label right": "The share of test images whose nearest neighbor has the right label, even if the image is called "
    "unknown.",
    "p": "The probability of so many losses if the candidate were not worse. A small p speaks against the candidate.",
    "recall@1": "Of an index: the share of images whose nearest neighbor is the one that an exact search finds.",
    "TPR": "Of images of known classes, the share that is taken for a known class.",
    "unknown": "What the release answers if an image is farther from the gallery than the threshold.",
}
"""Sorted by term."""
_TERMS = re.compile(
    "|".join(
        r"\bp(?= = )" if term == "p" else rf"\b{re.escape(term)}(?!\w)" for term in sorted(GLOSSARY, key=len)[::-1]
    )
)


def explain(text: object) -> Markup:
    """``text``, in which the first occurrence of each term of the glossary has its explanation, as
    a hint and as a link to the list of words on the page."""
    html, end, seen = Markup(""), 0, set[str]()
    for match in _TERMS.finditer(plain := str(text)):
        if match[0] not in seen:
            seen.add(match[0])
            html += escape(plain[end : match.start()]) + term(match[0])
            end = match.end()
    return html + escape(plain[end:])


def term(name: str) -> Markup:
    link = '<a class="term" href="#{}" title="{}">{}</a>'
    return Markup(link).format(anchor_of(name), GLOSSARY[name], name)  # noqa: S704 - our own words


def anchor_of(name: str) -> str:
    return "word-" + re.sub(r"\W+", "-", name.lower())


def glossary_page() -> str:
    """The glossary as a page of the documentation, in Markdown."""
    rows = "".join(f"| {name} | {text} |\n" for name, text in GLOSSARY.items())
    head = "# Glossary\n\nThe words of the run page, which explains them where they stand."
    return f"{head}\n\n|  |  |\n| -- | -- |\n{rows}"
