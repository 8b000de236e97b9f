"""The core behind FastAPI and uvicorn, one image per call in the thread pool:
``fastapi_app.py PARTS PORT``."""

import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool

from evernear.release.archive_reader import open_parts
from evernear.serving.core import Predictor
from evernear.serving.responses import Rejection

core = Predictor.open(open_parts(Path(sys.argv[1])))
app = FastAPI()


@app.post("/predict")
async def predict(request: Request) -> Response:
    (answer,) = await run_in_threadpool(core.predict, [await request.body()])
    status = answer.code if isinstance(answer, Rejection) else 200
    return Response(answer.model_dump_json(), status, media_type="application/json")


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), access_log=False, log_level="warning")
