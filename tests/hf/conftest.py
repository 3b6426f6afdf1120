"""HuggingFace tests need transformers; models.py beside this file is importable as ``models``."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed; pip install 'torchpaged[hf]'")
sys.path.insert(0, str(Path(__file__).parent))
