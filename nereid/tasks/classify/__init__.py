"""Classification: one score for each class."""

from nereid.base.assets import REPOSITORY
from nereid.base.contract import SCORES
from nereid.tasks.task import Task

TASKS = (
    Task(
        name="classify",
        work="classifies images",
        present="classifying",
        past="classified",
        model="classify",
        outputs=(SCORES,),
        path="/predict",
        repository=REPOSITORY,
        fix=f"--repository '{REPOSITORY}', or nereid add",
        network="scores of classes",
        is_default=True,
        faces={
            "outputs": "classify.outputs:outputs_of",
            "result": "classify.result:PREDICTIONS",
            "client": "classify.client:Classifier",
            "async_client": "classify.client:AsyncClassifier",
            "intake": "classify.intake:ClassifierIntake",
            "examination": "classify.examination:ComparedScores",
        },
        public={"client": ("Classifier", "AsyncClassifier"), "result": ("Label", "Prediction")},
    ),
)
