# Segue on CPUs:
#   docker build -f deploy/cpu.Dockerfile --build-arg TORCH_INDEX=URL -t segue:cpu .
#   docker run --rm -p 8000:8000 -v /path/to/checkpoint:/model:ro segue:cpu
# TORCH_INDEX is the package index of torch's CPU builds, given on torch's installation page. Without it, the image gets the
# CUDA build of the default index: it also runs on CPUs, and takes 5 GB more.
FROM python:3.12-slim-bookworm AS build
ARG TORCH_INDEX=
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/segue
WORKDIR /source
COPY constraints.txt ./
# a separate layer, which changes only with torch
RUN /opt/segue/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} \
    "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN /opt/segue/bin/pip install --no-cache-dir -c constraints.txt .

FROM python:3.12-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 segue \
    && install --directory --owner segue /var/lib/segue
COPY --from=build /opt/segue /opt/segue
ENV PATH=/opt/segue/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_STATE_HOME=/var/lib
USER 1000
VOLUME /var/lib/segue
EXPOSE 8000
# loading may take minutes; `docker stop` must wait for running requests: use `docker run --stop-timeout 90`
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["segue"]
CMD ["serve", "/model", "--host", "0.0.0.0"]
