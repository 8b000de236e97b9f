"""What the reports say about the problems of a dataset (`evernear.data.problems`)."""

PROBLEMS = {
    "undecodable": (
        "file cannot be decoded and was left out",
        "files cannot be decoded and were left out",
        "; fix or remove",
    ),
    "cropped": (
        "image has another aspect ratio and was cropped to its center",
        "images have another aspect ratio and were cropped to their centers",
        "",
    ),
    "letterboxed": (
        "image has another aspect ratio and was padded with gray bars",
        "images have another aspect ratio and were padded with gray bars",
        "",
    ),
    "stretched": (
        "image has another aspect ratio and was stretched",
        "images have another aspect ratio and were stretched",
        "",
    ),
    "upscaled": (
        "image is smaller than the dataset's size and was enlarged",
        "images are smaller than the dataset's size and were enlarged",
        "",
    ),
    "duplicate": (
        "image occurs more than once and was used once",
        "images occur more than once and were used once",
        "",
    ),
    "duplicate_across_splits": (
        "image is in several splits and was added to one of them",
        "images are in several splits, and each was added to one of them",
        "; keep one of",
    ),
    "earlier_split": (
        "image stays in the split of an earlier ingest, although the source now names another one",
        "images stay in the splits of an earlier ingest, although the source now names others",
        ":",
    ),
    "conflicting_labels": (
        "image has several labels and was left out",
        "images have several labels and were left out",
        "; keep the right one of",
    ),
    "hidden_folder": (
        "class folder has a name that begins with a dot, and was left out",
        "class folders have names that begin with a dot, and were left out",
        "; rename or remove",
    ),
    "constant_image": (
        "image has one value in all its pixels",
        "images have one value in all their pixels",
        "; look at",
    ),
    "no_class": (
        "image is in no class folder and was left out",
        "images are in no class folder and were left out",
        "; move",
    ),
    "not_an_image": (
        "file is not an image of a class and was left out",
        "files are not images of a class and were left out",
        ":",
    ),
    "litter": (
        "file or folder is hidden, left behind by a program or written by evernear, and was left out",
        "files or folders are hidden, left behind by a program or written by evernear, and were left out",
        ":",
    ),
    "nested_folder": (
        "class folder contains folders, whose names are not used",
        "class folders contain folders, whose names are not used",
        ":",
    ),
    "outside_link": (
        "link leads out of the source, to a folder whose images are used",
        "links lead out of the source, to folders whose images are used",
        ":",
    ),
    "merged_folders": (
        "class has several folders or spellings, because their names look the same",
        "classes have several folders or spellings each, because their names look the same",
        ":",
    ),
    "no_label": (
        "image has no label and was left out",
        "images have no label and were left out",
        "; complete",
    ),
    "duplicate_row": ("row of the table repeats another", "rows of the table repeat others", ":"),
    "split_group": (
        "group (data.group) has images in several splits, which the source or an earlier ingest chose",
        "groups (data.group) have images in several splits, which the source or an earlier ingest chose",
        ":",
    ),
    "few_groups": (
        "class has fewer than three groups (data.group), so it is missing in train, test or gallery",
        "classes have fewer than three groups (data.group), so they are missing in train, test or gallery",
        "; add other scenes of",
    ),
    "ungrouped": (
        "image has a name in which data.group finds no group, and counts as a group of one",
        "images have names in which data.group finds no group, and count as groups of one",
        ":",
    ),
    "low_contrast": (
        "image lost its contrast when it was reduced to 8 bits (data.bit_depth)",
        "images lost their contrast when they were reduced to 8 bits (data.bit_depth)",
        "; look at",
    ),
    "clipped": (
        "image has 16-bit values beyond the dataset's range (data.bit_depth) and was clipped",
        "images have 16-bit values beyond the dataset's range (data.bit_depth) and were clipped",
        "; look at",
    ),
    "grayed": (
        "image is in color and was stored in gray, like the dataset",
        "images are in color and were stored in gray, like the dataset",
        "",
    ),
}
"""The text for a single file, the text for several files, and the words before the names of the
files. If the last words are empty, the message mentions one affected file as an example."""

ADVICE = {
    "earlier_split": " To use the new splits, start a new dataset (--set data.dataset=NAME).",
    "nested_folder": " If the innermost folders are the classes, add --set data.layout=innermost; if the labels are"
    " right, add {off}.",
}
"""Advice that follows the sentence. ``{off}`` is the option that disables the rule."""
