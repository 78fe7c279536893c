# acclimate serve in a container. The folder /states keeps the adapted states of all streams.
#   docker build -t acclimate .
#   docker run -p 8000:8000 -v acclimate-states:/states acclimate --model bundled --method keel
FROM python:3.11-slim
WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir '.[serve]' && useradd --create-home acclimate && mkdir /states && chown acclimate /states
USER acclimate
VOLUME /states
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK CMD python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/v2/health/ready')"
ENTRYPOINT ["acclimate", "serve", "--host", "0.0.0.0", "--states", "/states"]
CMD ["--model", "bundled", "--method", "keel"]
