"""What is seen of a run: metrics, trackers, progress, logs, the summary and the last screen.

Nothing here decides anything about training.
"""

from tandem.observe.logs import setup_logging
from tandem.observe.metrics import MetricsLogger, mean_metrics, nan_mean, read_metrics
from tandem.observe.plot import text_plot
from tandem.observe.progress import Progress
from tandem.observe.summary import RunReport, Sample, final_screen, read_summary, write_summary
from tandem.observe.trackers import Tracker

__all__ = [
    "MetricsLogger",
    "Progress",
    "RunReport",
    "Sample",
    "Tracker",
    "final_screen",
    "mean_metrics",
    "nan_mean",
    "read_metrics",
    "read_summary",
    "setup_logging",
    "text_plot",
    "write_summary",
]
