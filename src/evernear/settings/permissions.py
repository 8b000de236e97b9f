from typing import Literal

from pydantic import Field

from evernear.settings.section import Section

Right = Literal["label", "start", "promote"]


class PermissionSettings(Section):
    """Who may change something in Slack and in the console. Reading needs no permission.

    A list contains IDs of Slack: of users (U..., W...), of user groups (S...) and of channels
    (C..., G...), whose members are all permitted. "Copy member ID" and "Copy link" show them. A
    list also contains the names of users that the console's proxy sends, or * for everyone whom it
    lets in. An empty list permits no one.
    """

    label: tuple[str, ...] = Field(default=(), description="Who may name images, and undo that.")
    start: tuple[str, ...] = Field(
        default=(),
        description="Who may start and stop runs, answer proposals, and pause the watcher.",
    )
    promote: tuple[str, ...] = Field(
        default=(), description="Who may promote a release that the gate held, and roll back."
    )
