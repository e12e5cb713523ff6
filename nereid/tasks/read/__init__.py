"""Reading: lines of text and barcodes, and the fields of a document."""

from dataclasses import replace

from nereid.base.assets import PARCEL_LABEL, TEXT_REPOSITORY
from nereid.base.contract import BOX, CONFIDENCE, FIELD, TEXT
from nereid.tasks.task import CommandTexts, Task

READ = Task(
    name="read",
    work="reads text",
    present="reading",
    past="read",
    model="read_text",
    outputs=(TEXT, CONFIDENCE, BOX),
    path="/v1/read",
    repository=TEXT_REPOSITORY,
    fix=f"nereid serve --task read, then here --repository '{TEXT_REPOSITORY}'",
    sample=PARCEL_LABEL,
    command=CommandTexts(
        help="Read the text of images on a running server; a model for documents prints its fields, too.",
        csv="Print one row per line of text, and per field.",
        note="An image without text is not a failure.",
        draws=True,
    ),
    faces={
        "outputs": "read.outputs:outputs_of",
        "result": "read.result:READINGS",
        "client": "read.client:Reader",
        "async_client": "read.client:AsyncReader",
        "view": "read.view:VIEW",
        "intake": "read.intake:ReaderIntake",
        "examination": "read.examination:ComparedLines",
    },
    public={"client": ("Reader", "AsyncReader"), "result": ("Correction", "Field", "Reading", "TextLine")},
)
WAYBILL = replace(
    READ,
    name="waybill",
    work="reads fields of documents",
    outputs=(*READ.outputs, FIELD),
    path="/v1/waybill",
    extends=READ.name,
    public={},
)
TASKS = READ, WAYBILL
