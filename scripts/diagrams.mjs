// Draws the Mermaid code of the pages as SVG, for the site: node scripts/diagrams.mjs (see diagrams.sh).
//
// The site shows these files in place of the code (scripts/site.py), so that a reader's browser loads nothing from
// elsewhere. Each file begins with the hash of its source, by which the build notices a drawing that is out of date.
import { createHash } from "node:crypto";
import { readFileSync, writeFileSync } from "node:fs";
import { basename } from "node:path";
import { pathToFileURL } from "node:url";

const modules = process.env.APRIL_DIAGRAM_MODULES;
const { default: puppeteer } = await import(pathToFileURL(`${modules}/puppeteer-core/lib/esm/puppeteer/puppeteer-core.js`));
const browser = await puppeteer.launch({ executablePath: process.env.APRIL_CHROMIUM, args: ["--no-sandbox"] });
const page = await browser.newPage();
await page.setContent("<!doctype html><body></body>");
await page.addScriptTag({ path: `${modules}/mermaid/dist/mermaid.min.js` });

for (const file of process.argv.slice(2)) {
  const sources = [...readFileSync(file, "utf8").matchAll(/```mermaid\n([\s\S]*?)```/g)].map((match) => match[1]);
  for (const [index, source] of sources.entries()) {
    const name = `${basename(file, ".md")}-${index + 1}`;
    const svg = await page.evaluate(
      async (name, source) => {
        mermaid.initialize({
          startOnLoad: false, theme: "neutral", fontFamily: "Arial, sans-serif", htmlLabels: false,
          deterministicIds: true, flowchart: { htmlLabels: false }, sequence: { mirrorActors: false, width: 120, actorMargin: 60 },
        });
        return (await mermaid.render(`diagram-${name}`, source)).svg;
      },
      name,
      source,
    );
    const hash = createHash("sha256").update(source).digest("hex");
    writeFileSync(`docs/images/${name}.svg`, `<!-- ${hash} -->\n${svg}\n`);
  }
}
await browser.close();
