// Decodes with llama.cpp, in its best build for this processor: `npm install node-llama-cpp` in the repository's root.
// The first line of standard input names the models, each further line a prompt; each is answered with one line of JSON.
import process from "node:process";
import readline from "node:readline";
import {DraftSequenceTokenPredictor, InputLookupTokenPredictor, getLlama} from "node-llama-cpp";

const neutral = {topK: 0, minP: 0, repeatPenalty: false};
let llama, given;
const models = {}, kept = {};

async function model(path) {
    models[path] ??= await llama.loadModel({modelPath: path, gpuLayers: 0, useMmap: true});
    return models[path];
}

async function sequence(path) {
    const context = await (await model(path)).createContext({contextSize: given.length, threads: given.threads});
    return [context, context.getSequence()];
}

async function opened(mode) {
    const contexts = [];
    const options = {};
    let draft;
    if (mode.draft) {
        let context;
        [context, draft] = await sequence(given.draft);
        contexts.push(context);
        // With fewer tokens at least, it verifies what the draft has just then: nothing, if both share the processor.
        options.tokenPredictor = new DraftSequenceTokenPredictor(draft, {minTokens: mode.draft.maxTokens, ...mode.draft});
    } else if (mode.lookup) {
        options.tokenPredictor = new InputLookupTokenPredictor(mode.lookup);
    }
    const context = await (await model(given.target)).createContext({
        contextSize: given.length, threads: given.threads
    });
    contexts.push(context);
    return {contexts, draft, own: context.getSequence(options), predictor: options.tokenPredictor};
}

// With `keep` the sequence goes on from one prompt to the next, and only what it has not read yet is read.
async function answer({mode, tokens, known = 0, keep = false, most, ends, sampling}) {
    const {contexts, draft, own, predictor} = keep
        ? kept[JSON.stringify(mode)] ??= await opened(mode)
        : await opened(mode);
    if (mode.lookup)
        predictor.updateInputTokens(tokens); // it looks nowhere else
    for (const each of known > 0 ? [draft, own] : [])
        await each?.evaluateWithoutGeneratingNewTokens(tokens.slice(0, known));
    const found = [];
    let first;
    const begun = performance.now();
    if (keep)
        await own.adaptStateToTokens(tokens.slice(0, -1), false);
    const start = keep ? own.nextTokenIndex : known;
    for await (const token of own.evaluate(tokens.slice(start), {...neutral, ...sampling, yieldEogToken: true})) {
        found.push(token);
        first ??= (performance.now() - begun) / 1000; // the prompt is read by then
        if (found.length === most || ends.includes(token))
            break;
    }
    const seconds = (performance.now() - begun) / 1000;
    const {used} = own.tokenPredictions;
    for (const each of keep ? [] : contexts)
        await each.dispose();
    return {tokens: found, seconds, first, forwards: found.length - used};
}

// Times of a forward of one token, of a whole prompt, and of a chunk after it (`benchmarks/kernels/forward.py`).
async function times({timed: length, chunk, repeats, chunks}) {
    const [context, own] = await sequence(given.target);
    const prompt = (start, count) => Array.from({length: count}, (_, place) => 1000 + (start + place) % 5000);
    const ms = async (work) => {
        const begun = performance.now();
        await work();
        return performance.now() - begun;
    };
    const whole = await ms(() => own.evaluateWithoutGeneratingNewTokens(prompt(0, length)));
    const after = [];
    for (let number = 0; number < chunks; number++) {
        after.push(await ms(() => own.evaluateWithoutGeneratingNewTokens(prompt(length, chunk))));
        await own.eraseContextTokenRanges([{start: length, end: length + chunk}]);
    }
    const tokens = own.evaluate([1000], {...neutral, temperature: 0, yieldEogToken: true});
    const single = [];
    for (let number = 0; number <= repeats; number++)
        single.push(await ms(() => tokens.next()));
    await tokens.return();
    await context.dispose();
    return {ms: {1: single.slice(1)}, after_ms: after, whole_ms: [whole]};
}

for await (const line of readline.createInterface({input: process.stdin})) {
    const asked = JSON.parse(line);
    let found;
    try {
        if (given == null) {
            given = asked;
            llama = await getLlama({build: "never", gpu: false, logLevel: "error", maxThreads: given.threads});
            found = {processor: llama.systemInfo};
        } else
            found = await (asked.timed ? times(asked) : answer(asked));
    } catch (error) {
        found = {error: String(error)};
    }
    process.stdout.write(JSON.stringify(found) + "\n");
}
process.exit(0);
