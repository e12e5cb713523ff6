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
    faces={
        "outputs": "read.outputs:outputs_of",
        "result": "read.result:READINGS",
        "client": "read.client:Reader",
        "async_client": "read.client:AsyncReader",
        "endpoint": "read.endpoint:READ",
        "intake": "read.intake:Reading",
        "examination": "read.examination:ReadLines",
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
    faces={**READ.faces, "endpoint": "read.endpoint:WAYBILL"},
    public={},
)
TASKS = READ, WAYBILL
