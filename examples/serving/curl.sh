#!/bin/sh
# A local server from the shell. Start `forerun serve` first. With --api-key, set KEY.
set -eu
URL=${URL:-http://127.0.0.1:8000}
MODEL=${MODEL:-smollm2} # the name that /v1/models gives

api() {
    curl --silent --show-error --fail-with-body --no-buffer \
        --header "Authorization: Bearer ${KEY:-none}" --header "Content-Type: application/json" "$@"
    echo
}

api "$URL/v1/models"

# A whole answer. `usage`, `metrics` and `timings` say what the drafts were worth.
api "$URL/v1/chat/completions" --data '{
  "model": "'"$MODEL"'", "temperature": 0, "max_tokens": 64,
  "messages": [{"role": "user", "content": "Why do cats purr?"}]
}'

# The same as it comes.
api "$URL/v1/chat/completions" --data '{
  "model": "'"$MODEL"'", "temperature": 0, "max_tokens": 64, "stream": true,
  "messages": [{"role": "user", "content": "Why do cats purr?"}]
}'

# Plain text goes on, without a chat template.
api "$URL/v1/completions" --data '{"model": "'"$MODEL"'", "prompt": "Once upon a time", "max_tokens": 32, "temperature": 0}'
