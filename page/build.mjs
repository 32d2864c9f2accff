// Bundles the page's source into the two files that lrpfx.report puts into each report.
import { readFileSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const output = process.argv[2] ?? "../lrpfx/reports/pages";
const licences = ["dagre", "graphlib"].map((name) => {
  const folder = `node_modules/@dagrejs/${name}`;
  const { version } = JSON.parse(readFileSync(`${folder}/package.json`, "utf8"));
  return `@dagrejs/${name} ${version}\n\n${readFileSync(`${folder}/LICENSE`, "utf8").trim()}`;
});
const notice = `page.js contains these libraries:\n\n${licences.join("\n\n")}\n`;
const options = {
  bundle: true,
  minify: true,
  charset: "utf8",
  legalComments: "none",
  write: false,
  logLevel: "warning",
};
const scripts = await build({
  ...options,
  entryPoints: ["src/main.ts"],
  format: "iife",
  target: ["chrome109", "firefox115", "safari16"],
  banner: { js: `/*! ${notice.replaceAll("*/", "* /").trim()}\n*/` },
});
const styles = await build({ ...options, entryPoints: ["src/page.css"] });
// Neither may end the element that it stands in.
const inside = (text) => text.replaceAll("</", "<\\/");
writeFileSync(`${output}/page.js`, inside(scripts.outputFiles[0].text));
writeFileSync(`${output}/page.css`, styles.outputFiles[0].text);
writeFileSync(`${output}/LICENCES.txt`, notice);
