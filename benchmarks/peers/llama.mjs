// Decodes with llama.cpp, in its best build for this processor: run `npm install node-llama-cpp` in
// the repository's root. The first line of standard input names the models, and each further line
// holds a prompt; each line is answered with one line of JSON.
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

async function newContext(path) {
    const loaded = await model(path);
    return loaded.createContext({contextSize: given.length, threads: given.threads});
}

async function opened(mode) {
    const contexts = [];
    const options = {};
    let draft;
    if (mode.draft) {
        const context = await newContext(given.draft);
        draft = context.getSequence();
        contexts.push(context);
        // With a smaller least number of tokens it verifies what the draft has at that moment:
        // nothing, if both share the processor.
        const {maxTokens} = mode.draft;
        options.tokenPredictor = new DraftSequenceTokenPredictor(draft, {
            minTokens: maxTokens, ...mode.draft
        });
    } else if (mode.lookup) {
        options.tokenPredictor = new InputLookupTokenPredictor(mode.lookup);
    }
    const context = await newContext(given.target);
    contexts.push(context);
    const target = context.getSequence(options);
    return {contexts, draft, target, predictor: options.tokenPredictor};
}

// Answers a prompt. With `keep` the sequence goes on from one prompt to the next, and only the
// tokens are read that it has not read yet. The first `known` tokens are read before, untimed.
async function answer({mode, tokens, known = 0, keep = false, most, ends, sampling}) {
    const {contexts, draft, target, predictor} = keep
        ? kept[JSON.stringify(mode)] ??= await opened(mode)
        : await opened(mode);
    if (mode.lookup)
        predictor.updateInputTokens(tokens); // because it looks nowhere else
    if (known > 0) {
        await draft?.evaluateWithoutGeneratingNewTokens(tokens.slice(0, known));
        await target.evaluateWithoutGeneratingNewTokens(tokens.slice(0, known));
    }
    const output = [];
    let first;
    const startedAt = performance.now();
    if (keep)
        await target.adaptStateToTokens(tokens.slice(0, -1), false);
    const start = keep ? target.nextTokenIndex : known;
    const options = {...neutral, ...sampling, yieldEogToken: true};
    for await (const token of target.evaluate(tokens.slice(start), options)) {
        output.push(token);
        first ??= (performance.now() - startedAt) / 1000; // the prompt is read by then
        if (output.length === most || ends.includes(token))
            break;
    }
    const seconds = (performance.now() - startedAt) / 1000;
    const {used} = target.tokenPredictions;
    if (!keep)
        for (const context of contexts)
            await context.dispose();
    return {tokens: output, seconds, first, forwards: output.length - used};
}

// Times forwards of one token, a whole prompt, and a chunk after it
// (`benchmarks/kernels/forward.py`).
async function times({timed: length, chunk, repeats, chunks}) {
    const context = await newContext(given.target);
    const target = context.getSequence();
    const prompt = (start, count) =>
        Array.from({length: count}, (_, place) => 1000 + (start + place) % 5000);
    const ms = async (work) => {
        const startedAt = performance.now();
        await work();
        return performance.now() - startedAt;
    };
    const whole = await ms(() => target.evaluateWithoutGeneratingNewTokens(prompt(0, length)));
    const after = [];
    for (let number = 0; number < chunks; number++) {
        after.push(await ms(
            () => target.evaluateWithoutGeneratingNewTokens(prompt(length, chunk))
        ));
        await target.eraseContextTokenRanges([{start: length, end: length + chunk}]);
    }
    const tokens = target.evaluate([1000], {...neutral, temperature: 0, yieldEogToken: true});
    const single = [];
    for (let number = 0; number <= repeats; number++)
        single.push(await ms(() => tokens.next()));
    await tokens.return();
    await context.dispose();
    return {ms: {1: single.slice(1)}, after_ms: after, whole_ms: [whole]};
}

async function start() {
    llama = await getLlama({
        build: "never", gpu: false, logLevel: "error", maxThreads: given.threads
    });
    return {processor: llama.systemInfo};
}

for await (const line of readline.createInterface({input: process.stdin})) {
    const question = JSON.parse(line);
    let result;
    try {
        if (given == null) {
            given = question;
            result = await start();
        } else
            result = await (question.timed ? times(question) : answer(question));
    } catch (error) {
        result = {error: String(error)};
    }
    process.stdout.write(JSON.stringify(result) + "\n");
}
process.exit(0);
