"""HuggingFace tests need transformers; models.py beside this file is importable as ``models``."""

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
if importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]
