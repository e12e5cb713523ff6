"""Reading: lines of text and barcodes, and the fields of a document."""

from dataclasses import replace

from nereid.base.assets import TEXT_REPOSITORY
from nereid.base.contract import BOX, CONFIDENCE, FIELD, TEXT
from nereid.tasks.task import Task

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
    network="the characters of lines",
    faces={
        "outputs": "read.outputs:outputs_of",
        "result": "read.result:READINGS",
        "client": "read.client:Reader",
        "async_client": "read.client:AsyncReader",
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
    network="",
    public={},
)
TASKS = READ, WAYBILL
