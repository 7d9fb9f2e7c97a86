import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # as Python does for a script in that folder
