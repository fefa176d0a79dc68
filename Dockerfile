# The server on CPU. For a GPU: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130, and run with --gpus.
#
#   docker build -t hotstart .
#   docker run --rm -p 8000:8000 -v /models:/models:ro -v hotstart-cache:/cache hotstart /models/llama

FROM python:3.11-slim-bookworm AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m venv /opt/hotstart
ENV PATH=/opt/hotstart/bin:$PATH
# A layer of its own: it is large, and changes only with torch.
RUN pip install --no-cache-dir "torch>=2.11" --index-url "$TORCH_INDEX"
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
# Byte code in the image: the user that serves cannot write it, and compiling takes seconds of each start.
RUN pip install --no-cache-dir . && python -m compileall -q /opt/hotstart

FROM python:3.11-slim-bookworm
COPY --from=build /opt/hotstart /opt/hotstart
RUN useradd --uid 1000 --create-home hotstart && install -d -o hotstart -g hotstart /cache
USER hotstart
ENV PATH=/opt/hotstart/bin:$PATH HOTSTART_CACHE_ROOT=/cache
VOLUME /cache
EXPOSE 8000
# SIGTERM lets running requests finish within --shutdown-timeout (30 s): docker stop --time 40.
ENTRYPOINT ["hotstart", "serve"]
