"""Which tier stands behind a place: a folder, or S3."""

from __future__ import annotations

from craton.ml.training.checkpoint.folder_tier import FolderTier
from craton.ml.training.checkpoint.tiers import Tier, TierFolder
from craton.remote import is_url


def open_tier(folder: TierFolder) -> Tier:
    """A folder or S3, as its path says."""
    if is_url(folder.path):
        from craton.ml.training.checkpoint.objects import ObjectTier

        return ObjectTier(folder)
    return FolderTier(folder)
