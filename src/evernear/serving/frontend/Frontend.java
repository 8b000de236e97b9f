package evernear;

import static java.nio.charset.StandardCharsets.UTF_8;

import io.grpc.ForwardingServerCall.SimpleForwardingServerCall;
import io.grpc.InternalGlobalInterceptors;
import io.grpc.Metadata;
import io.grpc.Server;
import io.grpc.ServerCall;
import io.grpc.ServerCallHandler;
import io.grpc.ServerInterceptor;
import io.grpc.Status;
import io.netty.bootstrap.ServerBootstrap;
import io.netty.buffer.Unpooled;
import io.netty.channel.Channel;
import io.netty.channel.ChannelDuplexHandler;
import io.netty.channel.ChannelFuture;
import io.netty.channel.ChannelFutureListener;
import io.netty.channel.ChannelHandlerContext;
import io.netty.channel.ChannelInboundHandlerAdapter;
import io.netty.channel.ChannelOption;
import io.netty.channel.ChannelPipeline;
import io.netty.channel.ChannelPromise;
import io.netty.channel.EventLoopGroup;
import io.netty.handler.codec.http.DefaultFullHttpRequest;
import io.netty.handler.codec.http.DefaultFullHttpResponse;
import io.netty.handler.codec.http.FullHttpRequest;
import io.netty.handler.codec.http.FullHttpResponse;
import io.netty.handler.codec.http.HttpHeaderNames;
import io.netty.handler.codec.http.HttpHeaderValues;
import io.netty.handler.codec.http.HttpMessage;
import io.netty.handler.codec.http.HttpMethod;
import io.netty.handler.codec.http.HttpObjectAggregator;
import io.netty.handler.codec.http.HttpRequest;
import io.netty.handler.codec.http.HttpResponse;
import io.netty.handler.codec.http.HttpResponseStatus;
import io.netty.handler.codec.http.HttpUtil;
import io.netty.handler.codec.http.HttpVersion;
import io.netty.handler.codec.http.LastHttpContent;
import io.netty.handler.codec.http.multipart.DefaultHttpDataFactory;
import io.netty.handler.codec.http.multipart.HttpPostRequestDecoder;
import io.netty.handler.codec.http.multipart.HttpPostRequestDecoder.EndOfDataDecoderException;
import io.netty.util.ReferenceCountUtil;
import io.netty.util.internal.logging.InternalLoggerFactory;
import io.netty.util.internal.logging.Slf4JLoggerFactory;
import java.io.IOException;
import java.lang.reflect.Field;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.GeneralSecurityException;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import org.apache.commons.cli.DefaultParser;
import org.apache.logging.log4j.LogManager;
import org.pytorch.serve.ModelServer;
import org.pytorch.serve.ServerInitializer;
import org.pytorch.serve.http.ErrorResponse;
import org.pytorch.serve.metrics.MetricCache;
import org.pytorch.serve.servingsdk.impl.PluginsManager;
import org.pytorch.serve.util.ConfigManager;
import org.pytorch.serve.util.Connector;
import org.pytorch.serve.util.ConnectorType;
import org.pytorch.serve.util.JsonUtils;
import org.pytorch.serve.util.NettyUtils;
import org.pytorch.serve.util.TokenAuthorization;

/**
 * TorchServe's frontend as evernear runs it: what TorchServe 0.12 has no switch for.
 *
 * <ul>
 *   <li>SIGTERM drains: no new connection, an answer to every request that came in, then the end.
 *   <li>A request that is too large, or a form that cannot be read, gets 4xx and a sentence, not a reset or a 500.
 *   <li>Where a process owns the server (serve --foreground), the server ends with it, even if it is killed.
 *   <li>In a pod, inference wants the token that all replicas share, and GET /ready tells whether predictions are
 *       answered.
 * </ul>
 */
public final class Frontend extends ModelServer {
    private static final Path OWNER_FILE = Path.of("owner.pid");
    private static final int OWNER_POLL_MS = 500;

    private final Traffic traffic = new Traffic();
    private final byte[] query;
    private Channel listener;

    private Frontend(ConfigManager config) throws IOException {
        super(config);
        String file = System.getProperty("evernear.query_file");
        query = file == null ? null : Files.readAllBytes(Path.of(file));
    }

    public static void main(String[] words) {
        try {
            ConfigManager.init(
                    new ConfigManager.Arguments(
                            new DefaultParser().parse(ConfigManager.Arguments.getOptions(), words, null, false)));
            TokenAuthorization.init();
            Token.share();
            PluginsManager.getInstance().initialize();
            MetricCache.init();
            InternalLoggerFactory.setDefaultFactory(Slf4JLoggerFactory.INSTANCE);
            Frontend frontend = new Frontend(ConfigManager.getInstance());
            Runtime.getRuntime().addShutdownHook(new Thread(frontend::drain, "drain"));
            InternalGlobalInterceptors.setInterceptorsTracers(
                    List.of(), List.of(new GrpcTraffic(frontend.traffic)), List.of());
            frontend.startRESTserver();
            frontend.startGRPCServers();
            System.out.println("Model server started.");
            endWithOwner();
        } catch (Throwable fault) {
            fault.printStackTrace();
            System.err.println(fault);
            Runtime.getRuntime().halt(1);
        }
    }

    /** The inference listener: TorchServe's own, except that it knows its connections and resets none. */
    @Override
    public ChannelFuture initializeServer(
            Connector connector, EventLoopGroup acceptors, EventLoopGroup workers, ConnectorType type)
            throws InterruptedException, IOException, GeneralSecurityException {
        if (type != ConnectorType.INFERENCE_CONNECTOR) {
            return super.initializeServer(connector, acceptors, workers, type);
        }
        ChannelFuture bound =
                new ServerBootstrap()
                        .group(acceptors, workers)
                        .channel(connector.getServerChannel())
                        .option(ChannelOption.SO_BACKLOG, 1024)
                        .childOption(ChannelOption.SO_KEEPALIVE, true)
                        .childOption(ChannelOption.TCP_NODELAY, true)
                        .childHandler(new Pipeline(type, traffic, query))
                        .bind(connector.getSocketAddress());
        listener = bound.sync().channel();
        return listener.closeFuture();
    }

    /** The shutdown hook: refuse new connections, answer what came in, and end within the time that is given. */
    private void drain() {
        long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(Long.getLong("evernear.drain_timeout_s", 30));
        try {
            if (listener != null) {
                // First of all: a connection that is told to end must not find its way back in.
                listener.close().sync();
            }
            Server rpc = rpcServer();
            if (rpc != null) {
                rpc.shutdown();
            }
            traffic.drain(deadline);
            if (rpc != null) {
                rpc.awaitTermination(deadline - System.nanoTime(), TimeUnit.NANOSECONDS);
            }
            LogManager.shutdown();
        } catch (InterruptedException | ReflectiveOperationException fault) {
            fault.printStackTrace();
        } finally {
            // TorchServe's own stop would idle for seconds; the workers end with their connection.
            Runtime.getRuntime().halt(0);
        }
    }

    private Server rpcServer() throws ReflectiveOperationException {
        Field field = ModelServer.class.getDeclaredField("inferencegRPCServer");
        field.setAccessible(true);
        return (Server) field.get(this);
    }

    private static void endWithOwner() throws InterruptedException, IOException {
        while (!Files.exists(OWNER_FILE)) {
            Thread.sleep(OWNER_POLL_MS);
        }
        long owner = Long.parseLong(Files.readString(OWNER_FILE).trim());
        ProcessHandle.of(owner).ifPresent(process -> process.onExit().join());
        System.exit(0);
    }
}

/** The inference token: of TorchServe's making, or the one that the replicas of a Service share. */
final class Token {
    private Token() {}

    /** Take the token from the file that is named, if one is; TorchServe checks it for REST and gRPC. */
    static void share() throws IOException, ReflectiveOperationException {
        String file = System.getProperty("evernear.token_file");
        if (file != null) {
            field().set(null, Files.readString(Path.of(file)).trim());
        }
    }

    /** What a request has to carry; null where tokens are off. */
    static String get() throws ReflectiveOperationException {
        return (String) field().get(null);
    }

    private static Field field() throws ReflectiveOperationException {
        Field field = TokenAuthorization.class.getDeclaredField("inferenceKey");
        field.setAccessible(true);
        return field;
    }
}

/** The connections of the inference listener. */
final class Traffic {
    private static final long FRESH_NS = TimeUnit.SECONDS.toNanos(2); // so old an answer proves that others come
    private static final int SETTLE_MS = 200; // by then, what was accepted last has become a connection
    private static final int QUIET_MS = 1000; // who sends nothing for so long is idle, and may be cut off
    private static final int POLL_MS = 10;

    private final Set<Connection> connections = ConcurrentHashMap.newKeySet();
    private volatile boolean draining;
    private volatile long answered = System.nanoTime() - FRESH_NS;

    /** A prediction was answered. */
    void answered() {
        answered = System.nanoTime();
    }

    /** Whether one was, a moment ago. */
    boolean isAnswered() {
        return System.nanoTime() - answered < FRESH_NS;
    }

    void add(Connection connection) {
        connections.add(connection);
    }

    void remove(Connection connection) {
        connections.remove(connection);
    }

    boolean isDraining() {
        return draining;
    }

    /** Let every connection end with its next answer, and wait until all have, but for idle ones. */
    void drain(long deadline) throws InterruptedException {
        draining = true;
        Thread.sleep(SETTLE_MS);
        long quiet = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(QUIET_MS);
        while (System.nanoTime() < deadline && isAwaited(System.nanoTime() < quiet)) {
            Thread.sleep(POLL_MS);
        }
    }

    private boolean isAwaited(boolean idleToo) {
        return connections.stream().anyMatch(connection -> idleToo || connection.isBusy());
    }
}

/** Tells of the predictions that are answered over gRPC. */
final class GrpcTraffic implements ServerInterceptor {
    private final Traffic traffic;

    GrpcTraffic(Traffic traffic) {
        this.traffic = traffic;
    }

    @Override
    public <A, B> ServerCall.Listener<A> interceptCall(
            ServerCall<A, B> call, Metadata headers, ServerCallHandler<A, B> next) {
        if (!"Predictions".equals(call.getMethodDescriptor().getBareMethodName())) {
            return next.startCall(call, headers);
        }
        return next.startCall(
                new SimpleForwardingServerCall<A, B>(call) {
                    @Override
                    public void close(Status status, Metadata trailers) {
                        if (status.isOk()) {
                            traffic.answered();
                        }
                        super.close(status, trailers);
                    }
                },
                headers);
    }
}

/** One connection: knows whether a request has no answer yet and, while the server drains, ends with its next. */
final class Connection extends ChannelDuplexHandler {
    private final Traffic traffic;
    private volatile int unanswered; // changed on the connection's own thread alone
    private boolean predicts;

    Connection(Traffic traffic) {
        this.traffic = traffic;
    }

    boolean isBusy() {
        return unanswered > 0;
    }

    @Override
    public void channelActive(ChannelHandlerContext context) {
        traffic.add(this);
        context.fireChannelActive();
    }

    @Override
    public void channelInactive(ChannelHandlerContext context) {
        traffic.remove(this);
        context.fireChannelInactive();
    }

    @Override
    public void channelRead(ChannelHandlerContext context, Object message) {
        if (message instanceof HttpRequest) {
            unanswered++;
            predicts = ((HttpRequest) message).uri().startsWith("/predictions/");
        }
        context.fireChannelRead(message);
    }

    @Override
    public void write(ChannelHandlerContext context, Object message, ChannelPromise promise) {
        boolean interim =
                message instanceof HttpResponse
                        && ((HttpResponse) message).status().equals(HttpResponseStatus.CONTINUE);
        if (message instanceof HttpResponse && !interim && traffic.isDraining()) {
            ((HttpResponse) message).headers().set(HttpHeaderNames.CONNECTION, HttpHeaderValues.CLOSE);
        }
        if (predicts && message instanceof HttpResponse && ((HttpResponse) message).status().equals(HttpResponseStatus.OK)) {
            traffic.answered();
        }
        if (message instanceof LastHttpContent && !interim) {
            promise = promise.unvoid();
            promise.addListener(written -> unanswered--);
            if (traffic.isDraining()) {
                promise.addListener(ChannelFutureListener.CLOSE);
            }
        }
        context.write(message, promise);
    }
}

/** TorchServe's handlers, with ours between them. */
final class Pipeline extends ServerInitializer {
    private final Traffic traffic;
    private final byte[] query;

    Pipeline(ConnectorType type, Traffic traffic, byte[] query) {
        super(null, type);
        this.traffic = traffic;
        this.query = query;
    }

    @Override
    public void initChannel(Channel channel) {
        super.initChannel(channel);
        int maxSize = ConfigManager.getInstance().getMaxRequestSize();
        channel.pipeline().addAfter("http", "connection", new Connection(traffic));
        channel.pipeline().replace("aggregator", "aggregator", new Body(maxSize));
        if (query != null) {
            channel.pipeline().addBefore("handler", "probe", new Probe(traffic, query));
        }
        channel.pipeline().addBefore("handler", "form", new Form(maxSize));
    }
}

/** Gathers a request; one that is too large is read to its end and refused with a sentence. */
final class Body extends HttpObjectAggregator {
    Body(int maxSize) {
        super(maxSize);
    }

    @Override
    protected void handleOversizedMessage(ChannelHandlerContext context, HttpMessage message) {
        // The connection stays open: closed before all was read, it would be reset and the answer lost.
        context.writeAndFlush(
                Refusal.of(
                        HttpResponseStatus.REQUEST_ENTITY_TOO_LARGE,
                        "TooLarge",
                        "The request is larger than " + maxContentLength() + " bytes."));
    }

    /** To a client that asks before it sends too much, the same answer. */
    @Override
    protected Object newContinueResponse(HttpMessage start, int maxSize, ChannelPipeline pipeline) {
        Object answer = super.newContinueResponse(start, maxSize, pipeline);
        boolean tooLarge =
                answer instanceof HttpResponse
                        && ((HttpResponse) answer).status().equals(HttpResponseStatus.REQUEST_ENTITY_TOO_LARGE);
        return tooLarge ? null : answer; // null: go on to handleOversizedMessage
    }
}

/** Refuses a form that TorchServe would fail on, with 500. */
final class Form extends ChannelInboundHandlerAdapter {
    private final int maxSize;

    Form(int maxSize) {
        this.maxSize = maxSize;
    }

    @Override
    public void channelRead(ChannelHandlerContext context, Object message) {
        FullHttpRequest request = (FullHttpRequest) message;
        if (isReadable(request)) {
            context.fireChannelRead(message);
            return;
        }
        ReferenceCountUtil.release(message);
        context.writeAndFlush(
                Refusal.of(
                        HttpResponseStatus.BAD_REQUEST,
                        "BadForm",
                        "The form cannot be read; send the image as its field \"data\", or as the body."));
    }

    private static boolean isForm(FullHttpRequest request) {
        return HttpPostRequestDecoder.isMultipart(request)
                || HttpHeaderValues.APPLICATION_X_WWW_FORM_URLENCODED.contentEqualsIgnoreCase(
                        HttpUtil.getMimeType(request));
    }

    /** Whether TorchServe will read it, if it is a form: the same steps, on the same bytes. */
    private boolean isReadable(FullHttpRequest request) {
        try {
            if (!isForm(request)) {
                return true;
            }
            HttpPostRequestDecoder form =
                    new HttpPostRequestDecoder(new DefaultHttpDataFactory(maxSize), request.duplicate());
            try {
                while (form.hasNext()) {
                    NettyUtils.getFormData(form.next());
                }
            } catch (EndOfDataDecoderException end) {
                return true;
            } finally {
                form.cleanFiles();
                form.destroy();
            }
            return true;
        } catch (RuntimeException | AssertionError fault) {
            return false;
        }
    }
}

/**
 * GET /ready, which wants no token: 200 if predictions are answered, by traffic of a moment ago or else by a stored query
 * that takes the way of all others.
 *
 * <p>Under load no query is added, and a queue that is full makes nobody unready whose worker works.
 */
final class Probe extends ChannelDuplexHandler {
    private static final String MODEL = System.getProperty("evernear.model");

    private final Traffic traffic;
    private final byte[] query;
    private boolean asked;

    Probe(Traffic traffic, byte[] query) {
        this.traffic = traffic;
        this.query = query;
    }

    @Override
    public void channelRead(ChannelHandlerContext context, Object message) throws ReflectiveOperationException {
        FullHttpRequest request = (FullHttpRequest) message;
        if (!request.uri().equals("/ready") || !request.method().equals(HttpMethod.GET)) {
            context.fireChannelRead(message);
            return;
        }
        ReferenceCountUtil.release(message);
        if (traffic.isAnswered()) {
            context.writeAndFlush(answer(HttpResponseStatus.OK));
            return;
        }
        FullHttpRequest asking =
                new DefaultFullHttpRequest(
                        HttpVersion.HTTP_1_1, HttpMethod.POST, "/predictions/" + MODEL, Unpooled.wrappedBuffer(query));
        HttpUtil.setContentLength(asking, query.length);
        HttpUtil.setKeepAlive(asking, HttpUtil.isKeepAlive(request));
        if (Token.get() != null) {
            asking.headers().set(HttpHeaderNames.AUTHORIZATION, "Bearer " + Token.get());
        }
        asked = true;
        context.fireChannelRead(asking);
    }

    @Override
    public void write(ChannelHandlerContext context, Object message, ChannelPromise promise) {
        if (asked && message instanceof FullHttpResponse) {
            asked = false;
            HttpResponseStatus status = ((FullHttpResponse) message).status();
            ReferenceCountUtil.release(message);
            if (status.equals(HttpResponseStatus.OK)) {
                traffic.answered();
            }
            context.write(answer(status), promise);
            return;
        }
        context.write(message, promise);
    }

    private static FullHttpResponse answer(HttpResponseStatus status) {
        return status.equals(HttpResponseStatus.OK)
                ? Json.of(status, Map.of("status", "Ready"))
                : Refusal.of(
                        HttpResponseStatus.SERVICE_UNAVAILABLE,
                        "NotReady",
                        "A stored query got " + status + " instead of a prediction.");
    }
}

/** An error in the shape of TorchServe's own. */
final class Refusal {
    private Refusal() {}

    static FullHttpResponse of(HttpResponseStatus status, String type, String message) {
        return Json.of(status, new ErrorResponse(status.code(), type, message));
    }
}

/** An answer whose body is an object. */
final class Json {
    private Json() {}

    static FullHttpResponse of(HttpResponseStatus status, Object content) {
        String body = JsonUtils.GSON_PRETTY.toJson(content);
        FullHttpResponse answer =
                new DefaultFullHttpResponse(HttpVersion.HTTP_1_1, status, Unpooled.copiedBuffer(body, UTF_8));
        answer.headers().set(HttpHeaderNames.CONTENT_TYPE, HttpHeaderValues.APPLICATION_JSON);
        HttpUtil.setContentLength(answer, answer.content().readableBytes());
        return answer;
    }
}
