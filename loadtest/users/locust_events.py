"""The handlers of Locust's events: options, statistics of all processes, report and exit code.

Importing this module patches the standard library for gevent, as Locust does, so it needs its own process.
"""

import json
import logging
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gevent
import locust.log
from locust import events
from locust.runners import STATE_MISSING, MasterRunner, WorkerRunner

from loadtest import record
from loadtest.users import photo_set, thresholds
from loadtest.users.locust_users import DEFAULT_HOST, WrongResponse
from loadtest.users.report import Report
from loadtest.users.request_mix import RESULTS
from loadtest.users.run_statistics import RunStatistics
from loadtest.users.turn_scheduler import ARRIVALS, DRAIN_S, SCENARIOS, UNANSWERED, TurnScheduler
from nereid.client.client_errors import NereidError
from nereid.tasks.classify.client import Classifier

# Names of the messages between Locust's processes.
STATISTICS, FINISH, FINISHED = "nereid_statistics", "nereid_finish", "nereid_finished"
# The workers' own limit, and some time for the messages.
WORKERS_DRAIN_S, POLL_S = DRAIN_S + 10.0, 0.05
# More than any model has; the server returns all classes.
ALL_CLASSES = 2**20
# Other defaults than Locust's.
DEFAULTS = {"num_users": 8, "spawn_rate": 100.0, "web_host": "127.0.0.1"}


def listen() -> None:
    """Register our options, and the handlers of each run."""
    events.init_command_line_parser.add_listener(add_options)
    events.init.add_listener(lambda environment, **rest: Run(environment))


def add_options(parser: Any) -> None:
    """Add the options of our users."""
    parser.set_defaults(**DEFAULTS)
    add: Callable[..., Any] = parser.add_argument
    kinds = "closed: send after each response; open: by a schedule"
    add("--scenario", choices=SCENARIOS, default="closed", help=kinds)
    add("--rate", type=record.positive, default=20.0, help="open: requests per second, all users together")
    add("--arrivals", choices=ARRIVALS, default="poisson", help="open: distribution of the times")
    add("--model", default="classify", help="a route, or any model with an input 'image'")
    add("--task", choices=RESULTS, default="classify", help="of the model")
    add("--grpc", default="", help="HOST:PORT of gRPC; default: the port after that of --host")
    key_help = "key for a guarded server; better in the variable"
    add("--api-key", default="", env_var="NEREID_KEY", include_in_web_ui=False, help=key_help)
    add("--variants", default="v1,v2", help="of the route, with commas; '' for other models")
    add("--keys", type=int, default=100, help="number of sticky callers; 0 while the route's weights change")
    add("--expect", default="", help="expected class index, label, or line of text; default: the sample's")
    folder_help = "folder with photos to send; its sub-folders have the names of classes"
    add("--images", default="", metavar="DIR", include_in_web_ui=False, help=folder_help)
    files = {"metavar": "FILE", "include_in_web_ui": False}
    add("--report", default="", help="write the report as JSON", **files)
    threshold_options = {"type": thresholds.checked, "default": str(thresholds.DEFAULT)}
    add("--thresholds", help="file with the limits; '' for no limits", **threshold_options, **files)


class Run:
    """The handlers of one process; in a distributed test the master has the statistics of its workers.

    Args:
        environment: Locust's; it gets the `scheduler` and the `photos` of its users.
    """

    def __init__(self, environment: Any) -> None:
        self._environment, self._options = environment, environment.parsed_options
        self._encoded: dict[str, dict[str, Any]] = {}
        self._finished: set[str] = set()
        self._is_passed: bool | None = None
        self._is_over = False
        self._is_worker = isinstance(environment.runner, WorkerRunner)
        self._is_master = isinstance(environment.runner, MasterRunner)
        hooks = environment.events
        if self._is_worker:
            environment.runner.register_message(FINISH, self.on_finish, concurrent=True)
            hooks.report_to_master.add_listener(self.on_report_to_master)
        else:
            hooks.test_stop.add_listener(self.on_test_stop)
            hooks.quitting.add_listener(self.on_quitting)
        if self._is_master:
            environment.runner.register_message(FINISHED, self.on_finished)
            hooks.worker_report.add_listener(self.on_worker_report)
        else:
            hooks.request.add_listener(self.on_request)
            hooks.spawning_complete.add_listener(self.on_spawning_complete)
        hooks.test_start.add_listener(self.on_test_start)
        hooks.test_stopping.add_listener(self.on_test_stopping)

    def on_test_start(self, **rest: Any) -> None:
        """Begin with empty statistics."""
        self._encoded.clear()
        self._finished.clear()
        self._is_passed, self._is_over = None, False
        scheduler = TurnScheduler(self._options.scenario, random.Random())
        self._environment.scheduler, self._environment.photos = scheduler, []
        try:
            if not self._is_master:
                self._environment.photos = self._photos()
        except (NereidError, OSError, ValueError) as error:
            logging.getLogger(__name__).error(f"--images: {error}")
            scheduler.finish()  # no user gets a turn
            gevent.spawn(self._environment.runner.quit)

    def on_spawning_complete(self, user_count: int, **rest: Any) -> None:
        """Start the schedule; the rate of this process is its share of the users."""
        if self._options.scenario != "open" or not user_count:
            return
        environment = self._environment
        if self._is_worker:
            environment.runner.spawning_greenlet.join()  # the master waits only 1 s for its workers' users
        classes = environment.user_classes_by_name
        callers = {
            classes[name].protocol: count
            for name, count in environment.runner.user_classes_count.items()
            if count
        }
        if callers:
            rate = self._options.rate * sum(callers.values()) / user_count
            dispatcher = environment.scheduler.schedule(rate, self._options.arrivals, callers)
            dispatcher.link_exception(locust.log.greenlet_exception_logger(logging.getLogger(__name__)))

    def on_request(
        self, request_type: str, response_time: float, exception: Any, context: Any, **rest: Any
    ) -> None:
        """Count a finished request."""
        service_ms, failure = context["service_ms"], ""
        if exception is not None:
            failure = str(exception) or type(exception).__name__
        self._environment.scheduler.statistics.of(request_type).add(response_time, service_ms, failure)

    def on_report_to_master(self, data: dict[str, Any], **rest: Any) -> None:
        """Send the present statistics to the master."""
        if scheduler := getattr(self._environment, "scheduler", None):
            data[STATISTICS] = scheduler.snapshot().encode()

    def on_worker_report(self, client_id: str, data: dict[str, Any], **rest: Any) -> None:
        """Replace the statistics of a worker."""
        if STATISTICS in data:
            self._encoded[client_id] = data[STATISTICS]

    def on_test_stopping(self, **rest: Any) -> None:
        """Wait for the requests in flight before Locust stops the users."""
        if self._is_master:
            self._finish_workers()
        elif self._has_begun:
            self._finish()

    def on_finish(self, **rest: Any) -> None:
        """Finish in a worker, and report that to the master."""
        data: dict[str, Any] = {}
        if self._has_begun:  # else the message came before the test
            self._finish()
            self.on_report_to_master(data)
        self._environment.runner.send_message(FINISHED, data)

    def on_finished(self, msg: Any, **rest: Any) -> None:
        """Take the last statistics of a worker."""
        self.on_worker_report(msg.node_id, msg.data)
        self._finished.add(msg.node_id)

    def on_test_stop(self, **rest: Any) -> None:
        """Print and write the report, and compare it with the thresholds."""
        if not self._has_begun:  # Locust ends without a started test
            return
        self._is_over = True
        encoded = (
            self._encoded.values() if self._is_master else [self._environment.scheduler.snapshot().encode()]
        )
        statistics = RunStatistics.merged(encoded)
        for user_class in self._environment.user_classes:
            statistics.of(user_class.protocol)  # a protocol without a request gets a row, which fails
        workers = {*self._encoded, *self._environment.runner.clients} if self._is_master else set()
        report = Report.of(self._options.scenario, statistics, len(workers - self._finished))
        report.show()
        if self._options.report:
            Path(self._options.report).write_text(json.dumps(asdict(report), indent=2) + "\n")
        if self._options.thresholds:
            lines = thresholds.compare(report, thresholds.read(self._options.thresholds))
            thresholds.show(report.scenario, lines)
            self._is_passed = all(line.is_met for line in lines)

    def on_quitting(self, environment: Any, **rest: Any) -> None:
        """Set the exit code from the thresholds; without thresholds Locust decides.

        A run that a signal ended early fails, because its later requests were not sent.
        """
        is_cut_short = self._options.headless and self._options.run_time and not self._is_over
        environment.runner.quit()
        is_sound = not environment.runner.exceptions and not locust.log.unhandled_greenlet_exception
        if is_cut_short:
            logging.getLogger(__name__).error("the run ended before its --run-time")
        if is_cut_short or self._is_passed is False:
            environment.process_exit_code = 1
        elif self._is_passed and is_sound:
            environment.process_exit_code = 0

    def _photos(self) -> list[photo_set.Photo]:
        options = self._options
        expected = photo_set.expectation(options.expect)
        if not options.images:
            return photo_set.sample(expected)
        address = urlsplit(self._environment.host or DEFAULT_HOST)

        def labels(photo: bytes) -> list[str]:
            with Classifier(address.netloc, "http", options.model) as classifier:
                ranking = classifier.classify(photo, top_k=ALL_CLASSES).labels
            return [label.name for label in sorted(ranking, key=lambda label: label.index)]

        return photo_set.own(Path(options.images), expected, labels if options.task == "classify" else None)

    @property
    def _has_begun(self) -> bool:
        return hasattr(self._environment, "scheduler")

    def _finish(self) -> None:
        for protocol, due_s in self._environment.scheduler.finish():
            late_ms = (time.monotonic() - due_s) * 1e3
            self._environment.events.request.fire(
                request_type=protocol,
                name=f"{self._options.model} unanswered",
                response_time=late_ms,
                response_length=0,
                exception=WrongResponse(UNANSWERED),
                context={"service_ms": late_ms},
            )

    def _finish_workers(self) -> None:
        runner = self._environment.runner
        runner.send_message(FINISH)
        deadline = time.monotonic() + WORKERS_DRAIN_S
        while time.monotonic() < deadline and not self._running() <= self._finished:
            gevent.sleep(POLL_S)

    def _running(self) -> set[str]:
        return {worker.id for worker in self._environment.runner.clients.all if worker.state != STATE_MISSING}
