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
            "intake": "embed.intake:Embeddings",
            "examination": "embed.examination:Vectors",
        },
        public={"client": ("Embedder", "AsyncEmbedder"), "result": ("Embedding",)},
    ),
)
