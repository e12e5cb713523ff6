"""Embeddings: one vector per image, whose direction represents the image's content."""

from nereid.base.contract import EMBEDDING
from nereid.base.task import CommandTexts, Task

TASKS = (
    Task(
        name="embed",
        verb_phrase="computes embeddings",
        present_participle="embedding",
        past_participle="embedded",
        model="embed",
        outputs=(EMBEDDING,),
        path="/v1/embed",
        fix="nereid add a network that returns embeddings",
        network="vectors of images",
        command=CommandTexts(
            help="Compute the embeddings of images on a running server.",
            csv="Print one row per image, with the numbers of its vector.",
        ),
        entry_points={
            "outputs": "embed.outputs:make_outputs",
            "result": "embed.result:EMBEDDINGS",
            "client": "embed.client:Embedder",
            "async_client": "embed.client:AsyncEmbedder",
            "view": "embed.view:VIEW",
            "endpoint": "embed.endpoint:ENDPOINT",
            "importer": "embed.importer:EmbedderImporter",
            "claims": "embed.examination:are_embeddings",
            "examination": "embed.examination:VectorExamination",
        },
        public={"client": ("Embedder", "AsyncEmbedder"), "result": ("Embedding",)},
    ),
)
