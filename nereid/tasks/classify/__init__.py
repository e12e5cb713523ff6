"""Classification: one score per class."""

from nereid.base.assets import REPOSITORY
from nereid.base.contract import SCORES
from nereid.base.task import CommandTexts, NumberOption, Task

CLASSIFY = Task(
    name="classify",
    verb_phrase="classifies images",
    present_participle="classifying",
    past_participle="classified",
    model="classify",
    outputs=(SCORES,),
    path="/predict",
    repository=REPOSITORY,
    fix=f"--repository '{REPOSITORY}', or nereid add",
    network="scores of classes",
    is_default=True,
    command=CommandTexts(
        help="Classify images on a running server.",
        csv="Print one row per image, with its best class.",
        numbers=(NumberOption("top", "top_k", 5, "Number of classes to print per image."),),
    ),
    entry_points={
        "outputs": "classify.outputs:make_outputs",
        "result": "classify.result:PREDICTIONS",
        "client": "classify.client:Classifier",
        "async_client": "classify.client:AsyncClassifier",
        "view": "classify.view:VIEW",
        "endpoint": "classify.endpoint:CLASSIFY",
        "importer": "classify.importer:ClassifierImporter",
        "examination": "classify.examination:ScoreExamination",
    },
    public={"client": ("Classifier", "AsyncClassifier"), "result": ("Label", "Prediction")},
)
TASKS = (CLASSIFY,)
