"""FastAPI and uvicorn, one image per call in the thread pool: ``fastapi_app.py DIRECTORY PORT``."""

import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from recognizers import open_recognizer

recognize = open_recognizer(Path(sys.argv[1]))
app = FastAPI()


@app.post("/predict")
async def predict(request: Request) -> Response:
    ((status, answer),) = await run_in_threadpool(recognize, [await request.body()])
    return Response(answer, status, media_type="application/json")


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), access_log=False, log_level="warning")
