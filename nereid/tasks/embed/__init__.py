"""Embeddings: one vector per image, whose direction says what the image shows."""

from nereid.base.contract import EMBEDDING
from nereid.tasks.task import Task

TASKS = (
    Task(
        name="embed",
        work="computes embeddings",
        present="embedding",
        past="embedded",
        model="embed",
        outputs=(EMBEDDING,),
        path="/v1/embed",
        fix="nereid add a network that returns embeddings",
        faces={
            "outputs": "embed.outputs:outputs_of",
            "result": "embed.result:EMBEDDINGS",
            "client": "embed.client:Embedder",
            "async_client": "embed.client:AsyncEmbedder",
            "endpoint": "embed.endpoint:ENDPOINT",
            "intake": "embed.intake:Embeddings",
            "claims": "embed.examination:are_embeddings",
            "examination": "embed.examination:ComparedVectors",
        },
        public={"client": ("Embedder", "AsyncEmbedder"), "result": ("Embedding",)},
    ),
)
