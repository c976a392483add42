import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.TimeUnit;
import org.apache.arrow.flight.CallOption;
import org.apache.arrow.flight.CallOptions;
import org.apache.arrow.flight.FlightDescriptor;
import org.apache.arrow.flight.FlightRuntimeException;
import org.apache.arrow.flight.FlightStatusCode;
import org.apache.arrow.flight.FlightStream;
import org.apache.arrow.flight.Ticket;
import org.apache.arrow.vector.BigIntVector;
import org.apache.arrow.vector.VarBinaryVector;
import org.apache.arrow.vector.VectorSchemaRoot;
import org.apache.arrow.vector.complex.StructVector;

/** Does operations on one log, one after the other, and notes each as history/history.go says. */
final class LogClient {
  private static final long PATIENCE_NS = TimeUnit.SECONDS.toNanos(20);

  private static final CallOption LIMIT = CallOptions.timeout(Proxies.ANSWER_S, TimeUnit.SECONDS);

  final List<ObjectNode> done = new ArrayList<>();
  private final Proxies proxies;
  private final String log;
  private final int number;
  private final Random random;
  private final long began;
  private final Map<String, PutStream> streams = new HashMap<>(); // by the token of the claim
  private boolean mayHaveEffect;

  LogClient(Proxies proxies, String log, int number, Random random, long began) {
    this.proxies = proxies;
    this.log = log;
    this.number = number;
    this.random = random;
    this.began = began;
  }

  /** Something to do, whose answer is written into the operation. */
  interface Call {
    void into(ObjectNode operation, long untilNs) throws Exception;
  }

  void close() {
    streams.values().forEach(PutStream::close);
    streams.clear();
  }

  void create() throws Exception {
    long untilNs = System.nanoTime() + 3 * PATIENCE_NS;
    proxies.attempts(
        random,
        untilNs,
        location -> {
          try {
            proxies.act(location, "create", Map.of("log", log));
          } catch (FlightRuntimeException error) {
            if (error.status().code() != FlightStatusCode.ALREADY_EXISTS) {
              throw error; // else an answer was lost before
            }
          }
        });
  }

  /** Asks the owner to let go of the log; whether it does is not noted. */
  void release() {
    try {
      proxies.act(proxies.pick(random), "release", Map.of("log", log));
    } catch (Exception error) {
      // it goes on
    }
  }

  static ObjectNode operation(String kind) {
    return Proxies.JSON.createObjectNode().put("kind", kind);
  }

  /** Notes an operation and its outcome: unknown if it failed after it may have had an effect. */
  private ObjectNode perform(ObjectNode operation, Call call) throws Exception {
    mayHaveEffect = false;
    operation.put("client", number).put("call", System.nanoTime() - began).put("outcome", "done");
    try {
      call.into(operation, System.nanoTime() + PATIENCE_NS);
    } catch (Proxies.Refusal refused) {
      operation.put("error", refused.name).put("outcome", "refused").remove("rows");
      if (refused.last != null && !refused.last.equals("none")) {
        operation.put("last", refused.last);
      }
      if (mayHaveEffect && !refused.name.equals("ConditionFailedError")) {
        operation.put("outcome", "unknown");
      }
    }
    operation.put("return", System.nanoTime() - began);
    done.add(operation);
    return operation;
  }

  /** Makes a refusal final, once what is sent again might be done twice. */
  private static Proxies.Refusal last(Proxies.Refusal refused) {
    return new Proxies.Refusal(
        refused.name, refused.location, refused.last, false, refused.isSilent);
  }

  /** Appends records; those of a producer again until it is known what became of them. */
  ObjectNode append(ObjectNode operation) throws Exception {
    return perform(
        operation.put("kind", "append"),
        (appended, untilNs) ->
            proxies.attempts(random, untilNs, location -> appendAt(location, appended)));
  }

  private void appendAt(String location, ObjectNode operation) throws Exception {
    boolean isConditional = operation.path("conditional").asBoolean();
    JsonNode claim = operation.get("claim");
    String key = claim == null ? "" : claim.get("token").asText();
    List<String> values = new ArrayList<>();
    operation.get("values").forEach(value -> values.add(value.asText()));
    if (isConditional && claim != null) {
      forget(key); // it would not know of the numbers that are used elsewhere
    }
    PutStream stream = isConditional ? null : streams.get(key);
    if (stream == null) {
      Map<String, Object> command = new LinkedHashMap<>(Map.of("log", log));
      if (claim != null) {
        command.put("producer", wire(claim));
      }
      if (isConditional) {
        String expected = operation.path("expected").asText("");
        command.put("expected", expected.isEmpty() ? null : expected);
      }
      stream = new PutStream(proxies, location, command);
      if (!isConditional) {
        streams.put(key, stream);
      }
    }
    try {
      Long sequence = claim == null ? null : operation.get("sequence").asLong();
      operation.put("last", stream.append(values, sequence, isConditional)).put("note", location);
    } catch (Exception error) {
      Proxies.Refusal refused = refusal(error);
      boolean isUncertain = stream.isSent && refused.mayHaveEffect();
      mayHaveEffect |= isUncertain;
      if (!isConditional) {
        forget(key);
      }
      throw isUncertain && claim == null ? last(refused) : refused;
    } finally {
      if (isConditional) {
        stream.close();
      }
    }
  }

  private static Proxies.Refusal refusal(Exception error) throws Exception {
    if (error instanceof FlightRuntimeException failed) {
      return Proxies.Refusal.of(failed);
    }
    if (error instanceof Proxies.Refusal refused) {
      return refused;
    }
    throw error;
  }

  private void forget(String key) {
    PutStream stream = streams.remove(key);
    if (stream != null) {
      stream.close();
    }
  }

  /** Begins an incarnation of a producer: by the action, or by a stream that has its name. */
  ObjectNode begin(String producer) throws Exception {
    ObjectNode operation = operation("begin");
    operation.putObject("claim").put("producer", producer);
    boolean byAction = random.nextBoolean();
    return perform(
        operation,
        (begun, untilNs) ->
            proxies.attempts(
                random,
                untilNs,
                location -> {
                  try {
                    beginAt(location, producer, byAction, begun);
                  } catch (Exception error) {
                    Proxies.Refusal refused = refusal(error);
                    boolean isUncertain =
                        refused.mayHaveEffect() && !refused.name.equals("LogNotReadyError");
                    mayHaveEffect |= isUncertain;
                    throw isUncertain ? last(refused) : refused; // a try may begin another one
                  }
                }));
  }

  private void beginAt(String location, String producer, boolean byAction, ObjectNode operation)
      throws Exception {
    Map<String, Object> body = new LinkedHashMap<>(Map.of("log", log, "producer", producer));
    PutStream stream = byAction ? null : new PutStream(proxies, location, body);
    JsonNode reply = byAction ? proxies.act(location, "producer_init", body) : stream.ready;
    JsonNode claim = reply.get("producer");
    if (!byAction) {
      streams.put(claim.get("token").asText(), stream);
    }
    ObjectNode noted = (ObjectNode) operation.get("claim");
    noted.put("epoch", claim.get("epoch").asLong()).put("base", claim.get("base").asLong());
    noted.put("token", claim.get("token").asText());
    operation.put("sequence", reply.get("sequence").asLong());
  }

  private static Map<String, Object> wire(JsonNode claim) {
    return Map.of(
        "name", claim.get("producer").asText(),
        "epoch", claim.get("epoch").asLong(),
        "base", claim.get("base").asLong(),
        "token", claim.get("token").asText());
  }

  ObjectNode seal() throws Exception {
    return perform(
        operation("seal"),
        (sealed, untilNs) ->
            proxies.attempts(
                random,
                untilNs,
                location -> {
                  try {
                    proxies.act(location, "seal", Map.of("log", log));
                  } catch (FlightRuntimeException error) {
                    mayHaveEffect |= Proxies.Refusal.of(error).mayHaveEffect();
                    throw error;
                  }
                }));
  }

  /** Performs what has no effect. Only the try that succeeded is noted. */
  private ObjectNode ask(ObjectNode operation, Proxies.Attempt attempt) throws Exception {
    return perform(
        operation,
        (asked, untilNs) ->
            proxies.attempts(
                random,
                untilNs,
                location -> {
                  asked.put("call", System.nanoTime() - began).put("note", location);
                  attempt.at(location);
                }));
  }

  /** Asks where the last record is. */
  ObjectNode tail() throws Exception {
    ObjectNode operation = operation("tail");
    return ask(
        operation,
        location -> {
          Map<String, ?> body = Map.of("log", log, "at", List.of());
          JsonNode last = proxies.act(location, "positions", body).path("last");
          if (last.isObject()) {
            operation.put("last", last.get("dlsn").asText());
            operation.put("last_number", last.get("sequence_id").asLong());
          }
        });
  }

  /** Asks how many records there are. */
  ObjectNode count() throws Exception {
    ObjectNode operation = operation("count");
    return ask(
        operation,
        location -> {
          operation.put(
              "count",
              proxies
                  .connect(location)
                  .getInfo(FlightDescriptor.path(log), LIMIT)
                  .getRecords());
        });
  }

  /** Reads all from a position to before another one; either may be "", which leaves it out. */
  ObjectNode read(String start, String end) throws Exception {
    ObjectNode operation = operation("read").put("start", start).put("end", end);
    Map<String, Object> ticket = new LinkedHashMap<>();
    ticket.put("log", log);
    ticket.put("columns", List.of("dlsn", "sequence_id", "value"));
    if (!start.isEmpty()) {
      ticket.put("start", Map.of("dlsn", start));
    }
    if (!end.isEmpty()) {
      ticket.put("end", Map.of("dlsn", end));
    }
    Ticket asked = new Ticket(Proxies.JSON.writeValueAsBytes(ticket));
    return ask(
        operation,
        location -> {
          ArrayNode rows = operation.putArray("rows");
          try (FlightStream stream = proxies.connect(location).getStream(asked, LIMIT)) {
            while (stream.next()) {
              add(rows, stream.getRoot());
            }
          }
        });
  }

  private static void add(ArrayNode rows, VectorSchemaRoot batch) {
    StructVector positions = (StructVector) batch.getVector("dlsn");
    BigIntVector numbers = (BigIntVector) batch.getVector("sequence_id");
    VarBinaryVector values = (VarBinaryVector) batch.getVector("value");
    for (int row = 0; row < batch.getRowCount(); row++) {
      StringBuilder position = new StringBuilder();
      for (String part : List.of("lssn", "entry", "slot")) {
        position.append(position.isEmpty() ? "" : ":");
        position.append(((BigIntVector) positions.getChild(part)).get(row));
      }
      rows.addObject()
          .put("position", position.toString())
          .put("number", numbers.get(row))
          .put("value", new String(values.get(row), StandardCharsets.UTF_8));
    }
  }
}
