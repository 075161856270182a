#!/usr/bin/env bash
# Draws the Mermaid diagrams of the documentation into docs/images, after a change of their code. Needs Node.js and Chromium.
set -euo pipefail
cd "$(dirname "$0")/.."
APRIL_CHROMIUM=${APRIL_CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome)}
export APRIL_CHROMIUM APRIL_DIAGRAM_MODULES=$PWD/.diagrams/node_modules
mkdir -p .diagrams
npm install --prefix .diagrams --no-audit --no-fund --silent mermaid@11 puppeteer-core@24
grep -rl '```mermaid' docs | xargs node scripts/diagrams.mjs
