// An answer's chunks become a message.

export const emptyAnswer = model => ({role: "assistant", content: "", reasoning: "", calls: [], model});

// Takes chunks of one answer into `node`, and times them
export class Absorber {
  constructor(node) {
    Object.assign(this, {node, asked: performance.now(), first: 0, thinking: 0});
  }

  take(chunk) {
    const choice = chunk.choices?.[0];
    if (choice?.delta) this.#delta(choice.delta);
    if (choice?.finish_reason) this.node.finish = choice.finish_reason;
    if (chunk.usage || chunk.timings) this.#numbers(chunk);
  }

  #delta(delta) {
    const {node} = this, now = performance.now();
    const reasoning = delta.reasoning_content ?? delta.reasoning;
    if (!reasoning && !delta.content && !delta.tool_calls) return;   // the role alone
    this.first ||= now;
    if (reasoning) {
      this.thinking ||= now;
      node.reasoning += reasoning;
    }
    if (this.thinking && node.thought === undefined && (delta.content || delta.tool_calls)) node.thought = (now - this.thinking) / 1000;
    if (delta.content) node.content += delta.content;
    for (const piece of delta.tool_calls ?? []) {
      const call = (node.calls[piece.index] ??= {id: piece.id, name: "", arguments: ""});
      call.name += piece.function?.name ?? "";
      call.arguments += piece.function?.arguments ?? "";
    }
  }

  // Speed by the server's clock where it tells; the first token by ours, which has the way to here
  #numbers({usage, timings}) {
    const tokens = usage?.completion_tokens ?? timings?.predicted_n;
    const seconds = (performance.now() - this.first) / 1000;
    const old = this.node.stats ?? {};
    this.node.stats = {
      tokens: tokens ?? old.tokens,
      prompt: usage?.prompt_tokens ?? old.prompt,
      cached: usage?.prompt_tokens_details?.cached_tokens ?? old.cached,
      speed: timings?.predicted_per_second ?? old.speed ?? (tokens > 1 && this.first ? (tokens - 1) / seconds : undefined),
      first: this.first ? (this.first - this.asked) / 1000 : undefined,
    };
  }

  end() {
    if (this.thinking && this.node.thought === undefined) this.node.thought = (performance.now() - this.thinking) / 1000;
  }
}
