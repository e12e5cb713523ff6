"""Reporting of the signals of images and responses to Triton."""

from collections.abc import Callable, Sequence

from nereid.backends.routing import quality
from nereid.backends.routing.reference_file import ReferenceWatch, path_of
from nereid.backends.triton.metric_reporter import MetricReporter
from nereid.backends.triton.metrics import IMAGE_METRICS, IMAGE_PREFIX, ROUTE_PREFIX, ROUTE_QUALITY_METRICS
from nereid.base.config.model_config import ModelConfig
from nereid.base.config.server_flags import measures_signals
from nereid.tasks.task_outputs import TaskOutputs

# A flush sends up to 20 counters for each signal, so it is rare: at most 2 ms of CPU in this time.
FLUSH_S = 5.0


class ImageSignals(MetricReporter):
    """Signals of the images of a preprocessing or fused model; `sink` takes those of one image, if any."""

    def __init__(self, config: ModelConfig) -> None:
        labels = {"model": config.name, "version": str(config.version)}
        super().__init__(IMAGE_PREFIX, IMAGE_METRICS, FLUSH_S, **labels)
        self.sink = self.add_all if measures_signals() else None


def read_class_names(config: ModelConfig) -> Sequence[str]:
    """Return the lines of the first output's label file; () without one."""
    outputs = config.document.get("output") or [{}]
    try:
        return (config.folder / (outputs[0].get("label_filename") or "")).read_text().splitlines()
    except (OSError, UnicodeDecodeError):  # none, or a folder
        return ()


class RouteSignals:
    """Signals of the responses of one instance of a route.

    Args:
        config, task: of the route.
        instance: name of the instance.
        warn: receives a line if the route's reference is invalid.
    """

    def __init__(
        self, config: ModelConfig, task: TaskOutputs, instance: str, warn: Callable[[str], None]
    ) -> None:
        self._metrics = MetricReporter(
            ROUTE_PREFIX, ROUTE_QUALITY_METRICS, FLUSH_S, route=config.name, model_instance=instance
        )
        self._quality = quality.RouteQuality(self._metrics, task)
        self._watch, self._warn = ReferenceWatch(path_of(config.folder.parent, config.name)), warn
        self.observe = self._quality.observe if measures_signals() else quality.ignore
        self.poll()

    def poll(self) -> None:
        """Read the reference if its file has changed; without a valid one, no class is counted."""
        if self._watch.poll():
            self._quality.use(self._watch.classes)
            if self._watch.problem:
                self._warn(f"no class is counted: {self._watch.problem}")

    def close(self) -> None:
        """Send the last changes."""
        self._metrics.close()
