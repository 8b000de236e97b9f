"""The settings of the ``validation`` section."""

from typing import Literal

from pydantic import Field

from evernear.settings.section import Section

Severity = Literal["error", "warn", "info", "off"]


class ValidationSettings(Section):
    """Severity of each validation rule. An error stops the run. A warning reports a
    problem without stopping the run. Info does not report a problem."""

    undecodable: Severity = Field(
        default="error",
        description="A file is not an image, is damaged, or exceeds a limit; it is left out. Only a"
        " warning up to max_left_out_fraction.",
    )
    cropped: Severity = Field(
        default="warn", description="Images of another aspect ratio were cropped to their centers."
    )
    letterboxed: Severity = Field(
        default="warn", description="Images of another aspect ratio were padded with gray bars."
    )
    stretched: Severity = Field(default="warn", description="Images of another aspect ratio were stretched.")
    upscaled: Severity = Field(
        default="warn", description="Images are smaller than the dataset's size and were enlarged."
    )
    duplicate: Severity = Field(default="warn", description="An image occurs more than once; it is used once.")
    duplicate_across_splits: Severity = Field(
        default="warn", description="An image is in several splits; it is added to one of them."
    )
    near_duplicate: Severity = Field(
        default="warn",
        description="More test images than usual are nearly the same as an image of train or gallery; the gate's rule"
        " test_images_unseen fails.",
    )
    split_group: Severity = Field(default="warn", description="A group of data.group has images in several splits.")
    few_groups: Severity = Field(
        default="warn",
        description="A class has fewer than three groups of data.group, one group has a large share of the images of"
        " several classes, or the test split has too few groups to compare a first release with trivial baselines.",
    )
    ungrouped: Severity = Field(default="warn", description="data.group finds no group in the name of an image.")
    conflicting_labels: Severity = Field(
        default="error",
        description="An image has several labels; it is left out. Only a warning up to max_left_out_fraction.",
    )
    tiny_class: Severity = Field(default="error", description="A class has fewer than min_class_images images.")
    empty_split: Severity = Field(default="error", description="A split has no image.")
    missing_in_gallery: Severity = Field(
        default="error",
        description="A class has no image in train or the gallery, so the class cannot be recognized.",
    )
    missing_in_split: Severity = Field(default="warn", description="Another split has no image of a class.")
    reviewed: Severity = Field(
        default="info",
        description="Images that came by review were in test or query and are used for training only, or their class"
        " has fewer than min_class_images images and waits.",
    )
    vanished_class: Severity = Field(
        default="error", description="A class of the champion has no image, unless ``classes`` retires or renames it."
    )
    unknown_class: Severity = Field(
        default="warn", description="``classes`` retires or renames a class that the champion does not have."
    )
    hidden_folder: Severity = Field(
        default="warn", description="The name of a class folder begins with a dot; it is left out."
    )
    no_class: Severity = Field(default="warn", description="An image is in no class folder; it is left out.")
    not_an_image: Severity = Field(
        default="info",
        description="A file has neither the suffix nor the content of an image, or a sample of a WebDataset has another"
        " image; it is left out.",
    )
    litter: Severity = Field(
        default="info",
        description="A file or folder is hidden, left behind by a program, such as @eaDir, or written by evernear,"
        " such as an export; it is left out.",
    )
    merged_folders: Severity = Field(
        default="info", description="Folders or labels are one class, because their names look the same."
    )
    no_label: Severity = Field(
        default="warn", description="A row of a table or an image in a packed file has no label; it is left out."
    )
    duplicate_row: Severity = Field(default="info", description="A row of a table repeats another.")
    similar_classes: Severity = Field(
        default="warn", description="Names of classes differ only in case, width or characters that nobody sees."
    )
    nested_folder: Severity = Field(
        default="warn", description="A class folder contains folders, which may be classes; see data.layout."
    )
    outside_link: Severity = Field(
        default="info", description="A link leads to a folder outside of the source; its images are used."
    )
    constant_image: Severity = Field(default="warn", description="All pixels of an image have the same value.")
    low_contrast: Severity = Field(
        default="warn", description="8 bits keep fewer than 16 gray values of a 16-bit or transparent image."
    )
    clipped: Severity = Field(default="warn", description="A 16-bit image has values beyond the dataset's bit depth.")
    imbalance: Severity = Field(
        default="warn", description="The largest class has more than max_imbalance times the images of the smallest."
    )
    from_scratch: Severity = Field(
        default="info",
        description="Photographs are trained from random weights, although pretrained ones recognize more.",
    )
    max_left_out_fraction: float = Field(
        default=0.02,
        ge=0,
        le=1,
        description="Largest share of images that may be undecodable or have conflicting labels without an error.",
    )
    min_class_images: int = Field(
        default=10,
        ge=1,
        description="A class with fewer images is tiny. A class of images from review is left out until it has as"
        " many.",
    )
    max_imbalance: float = Field(
        default=10.0, ge=1.0, description="Largest ratio of the largest class to the smallest class."
    )
