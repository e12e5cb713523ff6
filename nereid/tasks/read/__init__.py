"""Reading: lines of text and barcodes, and the fields of a document."""

from dataclasses import replace

from nereid.base.assets import PARCEL_LABEL, TEXT_REPOSITORY
from nereid.base.contract import BOX, CONFIDENCE, FIELD, TEXT
from nereid.base.task import AS_MODELS, CommandTexts, Task, TaskBackend

# Parameters that name the networks, each with its `…_version`. The recogniser is `network`, as in other
# tasks: the network that is published again.
READER_PARTS = ("detect", "direction", "network")
# A process that reads text keeps the activations of its largest image. Measured by hand as PSS of both
# processes of `read_text_v1` in profile `cpu` (AMD EPYC, 2026-11-26), after 40 waybills of `tests.waybills`
# of 0.15 to 0.95 megapixels: 542 and 517 MB one at a time, 681 and 607 MB with 8 in flight. After an image
# of 4 megapixels, it was 1.7 GB (2026-11-25).
READER_BYTES = 680_000_000
READ = Task(
    name="read",
    verb_phrase="reads text",
    present_participle="reading",
    past_participle="read",
    model="read_text",
    outputs=(TEXT, CONFIDENCE, BOX),
    path="/v1/read",
    repository=TEXT_REPOSITORY,
    fix=f"nereid serve --task read, then here --repository '{TEXT_REPOSITORY}'",
    backend=TaskBackend("text_reader", READER_PARTS, AS_MODELS, READER_BYTES),
    sample=PARCEL_LABEL,
    command=CommandTexts(
        help="Read the text of images and PDF files on a running server, and the fields of documents.",
        csv="Print one row per line of text, and per field.",
        note="An image without text is not a failure.",
        draws=True,
        suffixes=(".pdf",),
        writes_pdf=True,
    ),
    network="the characters of lines",
    entry_points={
        "outputs": "read.outputs:make_outputs",
        "result": "read.result:READINGS",
        "client": "read.client:Reader",
        "async_client": "read.client:AsyncReader",
        "view": "read.view:VIEW",
        "endpoint": "read.endpoint:READ",
        "importer": "read.importer:ReaderImporter",
        "examination": "read.examination:LineExamination",
        "settings": "read.reading_settings:ReadingSettings",
        "check": "read.importer:check",
        "metrics": "read.stages:METRICS",
        "stages": "read.stages:MEANINGS",
    },
    public={"client": ("Reader", "AsyncReader"), "result": ("Correction", "Field", "Reading", "TextLine")},
)
WAYBILL = replace(
    READ,
    name="waybill",
    verb_phrase="reads fields of documents",
    outputs=(*READ.outputs, FIELD),
    path="/v1/waybill",
    extends=READ.name,
    entry_points={**READ.entry_points, "endpoint": "read.endpoint:WAYBILL"},
    network="",
    public={},
)
TASKS = READ, WAYBILL
