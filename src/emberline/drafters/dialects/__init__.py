"""Dialects of draft checkpoints: what is in a folder or a file, brought to one spelling.

`read_checkpoint` recognises the dialect; each file here owns one family of them, and both ways of
it: the reader, and the writer where there is one. A new dialect is one file and one line in
`detect.py`.
"""

from __future__ import annotations

from emberline.drafters.dialects.canonical import DraftCheckpoint
from emberline.drafters.dialects.detect import read_checkpoint

__all__ = ["DraftCheckpoint", "read_checkpoint"]
