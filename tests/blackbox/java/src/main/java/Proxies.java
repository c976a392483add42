import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import io.grpc.ManagedChannel;
import io.grpc.netty.NettyChannelBuilder;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import org.apache.arrow.flight.Action;
import org.apache.arrow.flight.CallOptions;
import org.apache.arrow.flight.ErrorFlightMetadata;
import org.apache.arrow.flight.FlightClient;
import org.apache.arrow.flight.FlightGrpcUtils;
import org.apache.arrow.flight.FlightRuntimeException;
import org.apache.arrow.flight.FlightStatusCode;
import org.apache.arrow.flight.Result;
import org.apache.arrow.memory.BufferAllocator;
import org.apache.arrow.memory.RootAllocator;

/** A connection to each proxy, and which of them gave no answer of late. */
final class Proxies {
  static final ObjectMapper JSON = new ObjectMapper();
  static final BufferAllocator MEMORY = new RootAllocator();
  static final int ANSWER_S = 3; // of a proxy that lives; one that is frozen gives none
  private static final long AVOIDED_NS = TimeUnit.SECONDS.toNanos(2);
  private static final int PAUSE_MS_MAX = 500;

  private final List<String> locations;
  private final Map<String, ManagedChannel> channels = new ConcurrentHashMap<>();
  private final Map<String, FlightClient> clients = new ConcurrentHashMap<>();
  private final Map<String, Long> avoided = new ConcurrentHashMap<>();

  Proxies(List<String> locations) {
    this.locations = locations;
  }

  /** Why a call had no answer: the name of the proxy's error, or of the status. */
  static final class Refusal extends Exception {
    final String name;
    final String location; // where another proxy serves the log, or null
    final String last; // position of the log's last record; "none": there is none; or null
    final boolean passes; // the same call may succeed later, or elsewhere
    final boolean isSilent; // the proxy itself said nothing

    Refusal(String name, String location, String last, boolean passes, boolean isSilent) {
      super(name);
      this.name = name;
      this.location = location;
      this.last = last;
      this.passes = passes;
      this.isSilent = isSilent;
    }

    static Refusal of(FlightRuntimeException error) {
      String text = error.status().description() == null ? "" : error.status().description();
      int colon = text.indexOf(':');
      boolean isNamed = colon > 0 && text.substring(0, colon).matches("\\w+Error");
      FlightStatusCode code = error.status().code();
      ErrorFlightMetadata beside = error.status().metadata();
      boolean passes =
          code == FlightStatusCode.UNAVAILABLE
              || code == FlightStatusCode.TIMED_OUT
              || code == FlightStatusCode.CANCELLED
              || code == FlightStatusCode.RESOURCE_EXHAUSTED;
      return new Refusal(
          isNamed ? text.substring(0, colon) : code.name(),
          value(beside, "dlog-location"),
          value(beside, "dlog-last-dlsn"),
          passes,
          passes && !isNamed);
    }

    static Refusal silence() {
      return new Refusal("TIMED_OUT", null, null, true, true);
    }

    private static String value(ErrorFlightMetadata beside, String key) {
      return beside != null && beside.containsKey(key) ? beside.get(key) : null;
    }

    /** Whether what was refused may have been done all the same. */
    boolean mayHaveEffect() {
      return location == null && !isVerdict();
    }

    /** Whether the owner of the log decided about it, and has written nothing. */
    boolean isVerdict() {
      return List.of(
              "ConditionFailedError",
              "ProducerFencedError",
              "SequenceGapError",
              "EndOfStreamError")
          .contains(name);
    }
  }

  /** What to try at one proxy. */
  interface Attempt {
    void at(String location) throws Refusal, Exception;
  }

  /** Tries one proxy after another until it succeeds, is refused for good, or the time is over. */
  void attempts(Random random, long untilNs, Attempt attempt) throws Exception {
    String next = null;
    for (int pauseMs = 10; ; pauseMs = Math.min(2 * pauseMs, PAUSE_MS_MAX)) {
      String location = next == null ? pick(random) : next;
      try {
        try {
          attempt.at(location);
          return;
        } catch (FlightRuntimeException error) {
          throw Refusal.of(error);
        }
      } catch (Refusal refused) {
        if (refused.isSilent) {
          avoid(location);
        }
        if (!refused.passes || System.nanoTime() > untilNs) {
          throw refused;
        }
        next = silent().contains(refused.location) ? null : refused.location;
      }
      Thread.sleep(random.nextInt(pauseMs) + 1);
    }
  }

  FlightClient connect(String location) {
    return clients.computeIfAbsent(
        location,
        key -> {
          ManagedChannel channel =
              NettyChannelBuilder.forTarget(key.replace("grpc://", "")).usePlaintext().build();
          channels.put(key, channel);
          return FlightGrpcUtils.createFlightClient(MEMORY, channel);
        });
  }

  /** Returns some proxy, one that answers if any is thought to. */
  String pick(Random random) {
    List<String> choices = new ArrayList<>(locations);
    choices.removeAll(silent());
    List<String> from = choices.isEmpty() ? locations : choices;
    return from.get(random.nextInt(from.size()));
  }

  void avoid(String location) {
    avoided.put(location, System.nanoTime() + AVOIDED_NS);
    ManagedChannel channel = channels.get(location);
    if (channel != null) {
      channel.resetConnectBackoff(); // it may serve again before gRPC would ask
    }
  }

  /** Returns those that gave no answer of late. */
  List<String> silent() {
    long now = System.nanoTime();
    List<String> found = new ArrayList<>();
    avoided.forEach((location, until) -> { if (now < until) found.add(location); });
    return found;
  }

  /** Performs an action at one proxy. */
  JsonNode act(String location, String name, Map<String, ?> body) throws Exception {
    Action action = new Action(name, JSON.writeValueAsBytes(body));
    Iterator<Result> answers =
        connect(location).doAction(action, CallOptions.timeout(ANSWER_S, TimeUnit.SECONDS));
    return JSON.readTree(answers.next().getBody());
  }
}
